#!/usr/bin/env python3
"""Convert, compare and inspect Hugging Face and Megatron-Core checkpoints.

convert.py import --hf DIR --out DIR           # Hugging Face -> Megatron
convert.py export --megatron DIR --hf DIR      # Megatron -> Hugging Face
convert.py verify A B                          # compare tensor by tensor
convert.py inspect DIR                         # show the content
torchrun --rdzv-backend megarl --nproc-per-node 8 convert.py import ...
"""

import sys

from megarl.checkpoint.convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
