"""The division of GPUs between the two sides."""

from hypothesis import given
from hypothesis import strategies as st

from megarl.report.reading.advisories import Sides, best_split

SECONDS = st.floats(0.1, 100)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), SECONDS, SECONDS, SECONDS)
def test_no_other_division_is_shorter(
    trainer: int, rollout: int, trainer_unit: int, rollout_unit: int, fixed: float, passes: float, engines: float
) -> None:
    sides = Sides(trainer * trainer_unit, rollout * rollout_unit, trainer_unit, rollout_unit, fixed, passes, engines)
    total, now = sides.trainer_gpus + sides.rollout_gpus, sides.step_s(sides.trainer_gpus, sides.rollout_gpus)
    possible = [
        sides.step_s(t, r)
        for t in range(trainer_unit, total, trainer_unit)
        for r in range(rollout_unit, total - t + 1, rollout_unit)
    ]
    split = best_split(sides)
    if split is None:
        assert min(possible) / now >= 0.97 * (1 - 1e-9)
        return
    assert split.trainer_gpus % trainer_unit == 0 and split.rollout_gpus % rollout_unit == 0
    assert split.trainer_gpus + split.rollout_gpus <= total
    assert split.step_share * now <= min(possible) * (1 + 1e-9) and split.step_share < 0.97


def test_gpus_go_to_the_slower_side() -> None:
    slow_rollout = best_split(Sides(8, 8, 2, 2, 0.0, 5.0, 15.0))
    assert slow_rollout is not None and (slow_rollout.trainer_gpus, slow_rollout.rollout_gpus) == (4, 12)
    assert slow_rollout.step_share == 10 / 15
    assert best_split(Sides(4, 12, 2, 2, 0.0, 10.0, 10.0)) is None
    assert best_split(Sides(1, 1, 1, 1, 0.0, 1.0, 9.0)) is None
