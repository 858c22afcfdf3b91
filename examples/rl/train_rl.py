#!/usr/bin/env python3
"""Reinforcement learning of a language model: Megatron-Core trainer, vLLM rollout pool.

Usage:

    torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config CONFIG
    python examples/rl/train_rl.py --config CONFIG --dry-run              # the resolved config and plan, nothing starts
    torchrun ... examples/rl/train_rl.py --config CONFIG run.steps=10 trainer.optimizer.lr=1e-5
"""

from megarl.run.start.main import main

if __name__ == "__main__":
    main()
