"""Which checkpoints stay, exact, without ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.save.checkpoint_retention import best_step, to_delete


@given(
    st.sets(st.integers(1, 60), max_size=20),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sets(st.integers(1, 60), max_size=3),
    st.none() | st.integers(1, 60),
)
def test_retention(steps: set[int], last: int, every: int, leased: set[int], best: int | None) -> None:
    obsolete = to_delete(steps, keep_last=last, keep_every=every, best=best, leased=leased)
    kept = steps - set(obsolete)
    assert set(obsolete) <= steps and obsolete == sorted(obsolete)
    assert set(sorted(steps)[-last:]) <= kept
    assert not set(obsolete) & (leased | {best})
    assert all(step % every for step in obsolete) if every else True
    newest = set(sorted(steps)[-last:])
    assert all(step in newest | leased | {best} or (every and step % every == 0) for step in kept)


def test_the_best_is_the_earliest_of_equals() -> None:
    assert best_step({2: 0.5, 4: 0.7, 6: 0.7}, "max") == 4
    assert best_step({2: 0.5, 4: 0.7, 6: 0.5}, "min") == 2
    assert best_step({}, "max") is None
