"""Rows of one group, as a teacher scores them."""

from dataclasses import replace

from megarl.queue.trajectory import Trajectory, VersionSpan


def row(index: int, part: int = 0, tokens: int = 3, **fields: object) -> Trajectory:
    made = Trajectory(
        4, index, [1, 2], list(range(10, 10 + tokens)), [-0.5] * tokens, (VersionSpan(0, 0, tokens),), "stop", 1.0
    )
    return replace(made, part=part, **fields)  # type: ignore[arg-type]
