"""Splits the training problems into two data sets: sums with a carry, with different field names, and the rest."""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = Path("runs/tutorials/additions/train.jsonl")
OUT = Path("runs/tutorials/two_data_sets/data")


def main() -> None:
    """Write `plain.jsonl` with the usual fields, and `carries.jsonl`, whose fields the config names."""
    plain, carries = [], []
    for row in map(json.loads, SOURCE.read_text().splitlines()):
        a, b = (int(number) for number in row["problem"].removeprefix("What is ").removesuffix("?").split(" + "))
        if a % 10 + b % 10 < 10:
            plain.append(row)
        else:
            carries.append({"question": row["problem"], "solution": {"value": a + b, "ones": (a + b) % 10}})
    OUT.mkdir(parents=True, exist_ok=True)
    for name, rows in (("plain", plain), ("carries", carries)):
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{OUT / name}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main()
