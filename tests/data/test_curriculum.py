"""The contract of a curriculum: what its function sees and may return, and what a checkpoint keeps of it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from megarl.data import curriculum as module
from megarl.data.curriculum import KEPT_GROUPS, Curriculum, SetProgress, TrainingProgress

WEIGHTS = {"easy": 3.0, "hard": 1.0}
SEEN: list[TrainingProgress] = []


def by_reward(progress: TrainingProgress, ready: float = 0.5) -> dict[str, float]:
    """The easy set alone until its latest rewards reach `ready`."""
    SEEN.append(progress)
    latest = progress.sets["easy"].rewards[-2:]
    return {"easy": 1.0, "hard": float(sum(latest) >= ready * 2)}


def made(**kwargs: Any) -> Curriculum:
    SEEN.clear()
    return Curriculum(f"{__name__}:by_reward", kwargs, WEIGHTS)


def test_it_is_called_once_at_the_start_with_the_weights_of_the_config() -> None:
    curriculum = made()
    assert [TrainingProgress(0, 0, {"easy": SetProgress(3.0), "hard": SetProgress(1.0)})] == SEEN
    assert curriculum.first_weights == {"easy": 1.0, "hard": 0.0}


def test_it_sees_committed_groups_only_by_set_and_in_order() -> None:
    curriculum = made(ready=0.75)
    for group, name, rewards in ((2, "easy", [1.0, 1.0]), (0, "easy", [0.0, 1.0]), (1, "hard", []), (3, "hard", [1.0])):
        curriculum.finish(group, name, rewards)
    curriculum.commit([2, 1, 0])  # group 3 is finished and belongs to a later step
    progress = curriculum.progress(1, 8)
    assert progress == TrainingProgress(1, 8, {"easy": SetProgress(3.0, 2, (0.5, 1.0)), "hard": SetProgress(1.0, 1)})
    assert curriculum.weights(progress) == {"easy": 1.0, "hard": 1.0}
    assert made(ready=0.76).weights(progress) == {"easy": 1.0, "hard": 0.0}


def test_a_resumed_one_sees_the_same_and_forgets_what_was_not_committed() -> None:
    first = made()
    for group in range(KEPT_GROUPS + 10):
        first.finish(group, "easy", [float(group)])
    first.commit(range(KEPT_GROUPS + 5))
    state = json.loads(json.dumps(first.state_dict()))
    second = made()
    second.finish(0, "hard", [1.0])
    second.load_state_dict(state)
    assert second.progress(3, 9) == first.progress(3, 9)
    easy = second.progress(3, 9).sets["easy"]
    assert (easy.groups, len(easy.rewards), easy.rewards[-1]) == (KEPT_GROUPS + 5, KEPT_GROUPS, KEPT_GROUPS + 4.0)
    with pytest.raises(KeyError):
        second.commit([0])
    second.clear()
    assert second.progress(0, 0) == made().progress(0, 0)


NOT_CALLABLE = 3


async def waits(progress: TrainingProgress) -> dict[str, float]:
    return {}


def raises(progress: TrainingProgress) -> dict[str, float]:
    raise KeyError("medium")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:nothing", "cannot be imported: AttributeError"),
        (f"{__name__}:NOT_CALLABLE", "must be a plain function of one argument"),
        (f"{__name__}:waits", "must be a plain function of one argument"),
        (f"{__name__}:raises", "raised KeyError: 'medium'"),
        (f"{__name__}:test_it_is_called_once_at_the_start_with_the_weights_of_the_config", "raised TypeError"),
    ],
)
def test_what_is_no_curriculum_is_refused_at_the_start(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curriculum(function, {}, WEIGHTS)


@pytest.mark.parametrize(
    "returned",
    [None, [1, 2], {"easy": 1}, {"easy": 1, "hard": 1, "medium": 1}, {"easy": -1, "hard": 1}, {"easy": 0, "hard": 0},
     {"easy": "x", "hard": 1}, {"easy": float("nan"), "hard": 1}, {"easy": float("inf"), "hard": 1}],
)  # fmt: skip
def test_weights_that_cannot_be_used_are_named(returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function: Callable[..., Any] = lambda progress: returned  # noqa: E731
    monkeypatch.setattr(module, "_imported", lambda path: function)
    with pytest.raises(ValueError, match=r"'p:f' returned .* it must return a weight .* each of \['easy', 'hard'\]"):
        Curriculum("p:f", {}, WEIGHTS)
