"""The second set's reward: it reads another field of the row and gives half for the right last digit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BOX = re.compile(r"\\boxed\{(\d+)\}")


def digits(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the right number, 0.5 for one that ends with the right digit, else 0.

    `row` is the data set's row; parameters are matched by name.
    """
    boxes = BOX.findall(response)
    if not boxes:
        return 0.0
    return 1.0 if boxes[-1] == answer else 0.5 * (int(boxes[-1]) % 10 == row["solution"]["ones"])
