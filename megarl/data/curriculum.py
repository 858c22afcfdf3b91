"""The curriculum: a user's function that chooses the weights of the training sets from the progress of the run.

It is called at every start, for the initial weights, and after each committed step. Its weights apply to groups that
have not been admitted yet. Checkpoints contain the progress and the returned weights (`mixture.py`), so a resumed run
draws the same groups without calling it for past steps.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.common.imports import imported
from megarl.common.trust.secret_references import resolved

KEPT_GROUPS = 256  # latest groups per set whose rewards a curriculum sees


@dataclass(frozen=True)
class SetProgress:
    """The progress of a run in one set.

    Attributes:
        weight: the weight in the config.
        groups: the number of its committed groups.
        rewards: mean rewards of the latest of them (at most 256), oldest first; for rewards of 0 and 1 the accuracy.
            Groups without a usable sample are left out.
    """

    weight: float
    groups: int = 0
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrainingProgress:
    """The argument of a curriculum: steps done, the first group that its weights apply to, and the sets by name."""

    steps: int
    next_group: int
    sets: Mapping[str, SetProgress]


class Curriculum:
    """The user's function, and the progress of each set in the committed history."""

    def __init__(self, function: str, kwargs: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        """Import `function` and call it once. `weights`: the config's, by set.

        Raises ValueError that says what the function has to be if it cannot be imported, called, or used.
        """
        self.path = function
        self._function = _imported(function)
        self._kwargs = resolved(kwargs, "data.curriculum.kwargs")
        self._configured = dict(weights)
        self.clear()
        self.first_weights = self.weights(self.progress(0, 0))

    def clear(self) -> None:
        """Forget all progress, for a run that starts from the beginning."""
        self._open: dict[int, tuple[str, float | None]] = {}  # finished groups that are not committed
        self._groups = dict.fromkeys(self._configured, 0)
        self._rewards: dict[str, deque[float]] = {name: deque(maxlen=KEPT_GROUPS) for name in self._configured}

    def finish(self, group: int, name: str, rewards: Sequence[float]) -> None:
        """Record the rewards of the usable samples of a finished group of the set `name`."""
        self._open[group] = (name, sum(rewards) / len(rewards) if rewards else None)

    def reward(self, group: int) -> float | None:
        """Return the mean reward of a finished, uncommitted group; None without usable samples."""
        return self._open[group][1]

    def commit(self, groups: Iterable[int]) -> None:
        """Count committed groups, in the order of their ids."""
        for group in sorted(groups):
            name, reward = self._open.pop(group)
            self._groups[name] += 1
            if reward is not None:
                self._rewards[name].append(reward)

    def progress(self, steps: int, next_group: int) -> TrainingProgress:
        """Return the function's argument after `steps` steps, to choose weights from group `next_group` on."""
        return TrainingProgress(
            steps,
            next_group,
            {
                name: SetProgress(weight, self._groups[name], tuple(self._rewards[name]))
                for name, weight in self._configured.items()
            },
        )

    def weights(self, progress: TrainingProgress) -> dict[str, float]:
        """Call the function; return a weight for every set. Raises ValueError if it raises or returns anything else."""
        expected = f"return a weight (a number, at least 0, not all 0) for each of {sorted(self._configured)}"
        try:
            found = self._function(progress, **self._kwargs)
        except Exception as error:
            raise ValueError(f"data.curriculum {self.path!r} raised {type(error).__name__}: {error}") from error
        try:
            weights = {str(name): float(weight) for name, weight in found.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"data.curriculum {self.path!r} returned {found!r:.200}; it must {expected}") from None
        usable = all(0 <= weight < float("inf") for weight in weights.values()) and any(weights.values())
        if set(weights) != set(self._configured) or not usable:
            raise ValueError(f"data.curriculum {self.path!r} returned {weights!r:.200}; it must {expected}")
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the committed progress as JSON content."""
        return {name: {"groups": self._groups[name], "rewards": list(self._rewards[name])} for name in self._configured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved progress. Sets that are not in it start without any."""
        self.clear()
        for name, saved in state.items():
            self._groups[name] = int(saved["groups"])
            self._rewards[name].extend(saved["rewards"])


def _imported(path: str) -> Callable[..., Mapping[str, float]]:
    """Import the user's function. Raises ValueError that says what it has to be."""
    function: Callable[..., Mapping[str, float]] = imported(path, "data.curriculum")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(
            f"data.curriculum {path!r} must be a plain function of one argument "
            f"(megarl.data.curriculum.TrainingProgress) and of data.curriculum.kwargs, not {type(function).__name__}"
        )
    return function
