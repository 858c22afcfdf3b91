"""Rows that a leader sends to the other ranks of its replica: as they were, and refused if they are malformed."""

import pytest

from megarl.common.errors import MalformedMessage
from megarl.run.loop.batches import _ENCODED, ROWS
from tests.support.trainer.recorded_steps import make_batch

(CONTENT, TAG), *OTHERS = _ENCODED.decode(ROWS.encode(make_batch(0)))


def test_rows_arrive_as_they_were() -> None:
    rows = make_batch(0)
    assert len(rows) > 2 and ROWS.decode(ROWS.encode(rows)) == rows
    assert ROWS.decode(ROWS.encode([])) == []


@pytest.mark.parametrize(
    ("content", "tag"),
    [
        (b"", TAG),
        (b"x", TAG),
        (CONTENT[:-1], TAG),
        (CONTENT + b"x", TAG),
        (b"\xff" * len(CONTENT), TAG),
        (CONTENT, {}),
        (CONTENT, {"tag": "[]"}),
    ],
)
def test_malformed_rows_are_refused(content: bytes, tag: dict[str, str]) -> None:
    with pytest.raises(MalformedMessage, match="a leader sent"):
        ROWS.decode(_ENCODED.encode([(content, tag), *OTHERS]))
