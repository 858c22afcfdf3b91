"""The parts of a sample: they follow each other, and the first one stands for the sample."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.values import by_sample, first_parts


@dataclass(frozen=True)
class Row:
    sample: int
    part: int


@given(st.lists(st.integers(1, 4), max_size=6))
def test_rows_are_grouped_by_sample_in_order(counts: list[int]) -> None:
    rows = [Row(sample, part) for sample, count in enumerate(counts) for part in range(count)]
    samples = by_sample(rows)
    assert [row for sample in samples for row in sample] == rows
    assert [{row.sample for row in sample} for sample in samples] == [{number} for number in range(len(counts))]
    assert first_parts(rows) == [sample[0] for sample in samples]


@pytest.mark.parametrize("parts", [[1], [0, 2], [0, 1, 1], [0, 1, 3]])
def test_parts_that_do_not_follow_each_other_are_refused(parts: list[int]) -> None:
    with pytest.raises(ValueError, match=f"part {parts[-1]} of a sample does not follow"):
        by_sample([Row(0, part) for part in parts])
