"""Rows that a leader sends to the other ranks of its replica: as they were, and refused if they are malformed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.common.errors import MalformedMessage
from megarl.run.pool.row_codec import _MESSAGE, ROWS
from tests.support.trainer.recorded_steps import make_batch

SENT = _MESSAGE.decode(ROWS.encode(make_batch(0)))
END = len(SENT.values)


def test_rows_arrive_as_they_were() -> None:
    rows = make_batch(0)
    assert len(rows) > 2 and ROWS.decode(ROWS.encode(rows)) == rows
    assert ROWS.decode(ROWS.encode([])) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"values": b""},
        {"values": SENT.values[:-1]},
        {"values": SENT.values + b"x"},
        {"tags": []},
        {"tags": SENT.tags[:-1]},
        {"tags": [{}] * len(SENT.tags)},
        {"offsets": []},
        {"offsets": SENT.offsets[1:]},
        {"offsets": [*SENT.offsets, END]},
        {"offsets": [1, *SENT.offsets[1:]]},
        {"offsets": [0, SENT.offsets[2], SENT.offsets[1], *SENT.offsets[3:]]},
        {"offsets": [0, -8, *SENT.offsets[2:]]},
        {"offsets": [0, 2**63, *SENT.offsets[2:]]},
        {"offsets": [0, SENT.offsets[1] + 8, *SENT.offsets[2:]]},
        {"offsets": [0, 8, *SENT.offsets[2:]]},
        {"offsets": [0, 3, *SENT.offsets[2:]]},
        {"values": b"\xff" * END},
        {"offsets": [0] * len(SENT.tags) + [END]},
        {"values": b"", "offsets": [0] * len(SENT.offsets)},
        {"values": b"x", "offsets": [0], "tags": []},
    ],
)
def test_malformed_rows_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage, match="a leader sent"):
        ROWS.decode(_MESSAGE.encode(replace(SENT, **changes)))  # type: ignore[arg-type]
