"""The quickstart's world: arithmetic problems, a real tokenizer and a small warm-started Qwen3 checkpoint.

`python -m megarl.quickstart --out DIR` makes all of it once, from a seed. What it is, said plainly: the warm-start
corpus imitates students who know how to add two-digit numbers in columns but forget the carry three times out of
four. The checkpoint therefore has the skill and the bad habit: greedy decoding forgets the carry, sampling gets such
a problem right about one time in four. Reinforcement learning sees only whether the final answer is right; it has
to find the careful way among its own samples and make it the habit, on problems that it never saw.
"""
