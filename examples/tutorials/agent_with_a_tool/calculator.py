"""A custom tool: a plain function with typed arguments, which the model calls by name."""

from __future__ import annotations

import math


def calculator(expression: str) -> str:
    """Multiply whole numbers: `expression` is for example 12*34."""  # the model reads this line
    try:
        return str(math.prod(int(factor) for factor in expression.split("*")))
    except ValueError:
        return f"error: {expression[:40]!r} is no product of whole numbers"  # a mistake of the model is an answer
