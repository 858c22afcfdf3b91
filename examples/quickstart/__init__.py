"""Assets of the first runs: arithmetic problems, a tokenizer trained on them, and a small supervised Qwen3 checkpoint.

The quickstart's are described here, those of `make agents` in `products_task.py`, and those of
`make vision` in `bars_task.py`.

`python -m examples.quickstart --out DIR` makes all of them once, from a seed. The supervised (warm-start) corpus adds
two-digit numbers in columns, but three of four solutions of a problem with a carry forget the carry. The checkpoint
learns both: greedy decoding forgets the carry, and sampling solves such a problem about one time in four. Reinforcement
learning observes only whether the final answer is correct. It has to make the correct solutions among its own samples
more probable, and is evaluated on problems that it was not trained on.
"""
