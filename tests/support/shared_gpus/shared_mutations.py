"""Runs with one mistake in what moves memory between trainer and engines.

`-m tests.support.shared_gpus.shared_mutations` is `examples/rl/train_rl.py` with SHARED_MUTATION, a key of MUTATIONS,
in the trainer's ranks.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from megarl.run.loop import shared_gpus
from megarl.run.loop.shared_gpus import SharedGpus
from megarl.trainer.parking import StateMemory


def wake_before_compare() -> None:
    """Engines get their cache back, and so generate, before they have loaded and verified weights."""
    publish = SharedGpus.publish

    def publishing(self: SharedGpus) -> None:
        publish(self)
        if os.environ["RANK"] == "0":
            for replica in self._replicas():
                replica.call("wake", "weights", timeout_s=60.0)
                replica.call("wake", "kv_cache", timeout_s=60.0)

    SharedGpus.publish = publishing  # type: ignore[method-assign]


def moments_not_restored() -> None:
    """Adam's moments return as zeros. Gradients may return as anything: each update begins with zeros itself."""
    hold = StateMemory.hold

    @torch.no_grad()
    def holding(self: StateMemory, wanted: Any) -> int:
        before = self.resident
        moved = hold(self, wanted)
        if "optimizer" in self.resident - before:
            for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
                for value in (value for state in each.optimizer.state.values() for value in state.values()):
                    if torch.is_tensor(value) and value.numel() > 1:
                        value.zero_()
        return moved

    StateMemory.hold = holding  # type: ignore[method-assign]


def one_left_awake() -> None:
    """The trainer takes the GPUs while an engine has them."""
    shared_gpus.put_to_sleep = lambda replicas, rpc_s, held: []  # type: ignore[assignment]


ALL = (wake_before_compare, moments_not_restored, one_left_awake)
MUTATIONS: dict[str, Callable[[], None]] = {each.__name__: each for each in ALL}


if __name__ == "__main__":
    from megarl.run.start.main import main

    MUTATIONS[os.environ["SHARED_MUTATION"]]()
    main()
