"""Assets for the first runs: arithmetic problems, a tokenizer trained on them, and a small supervised Qwen3 checkpoint.

This describes the quickstart's; see `products_task.py` for `make agents` and `bars_task.py` for `make vision`.

`python -m examples.quickstart --out DIR` makes them all once, from a seed. The supervised (warm-start) corpus adds
two-digit numbers in columns, but three of four solutions to a problem with a carry forget it. The checkpoint learns
both: greedy decoding forgets the carry, and sampling solves such a problem about one time in four. Reinforcement
learning sees only whether the final answer is correct. It must make the correct solutions among its own samples more
probable, and is evaluated on unseen problems.
"""
