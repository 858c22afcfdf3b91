"""Curricula for tests of configs that name one."""

import json
import math
from pathlib import Path

from megarl.data.curriculum import TrainingProgress


def equal_shares(progress: TrainingProgress) -> dict[str, float]:
    """Return the same weight for each set."""
    return dict.fromkeys(progress.sets, 1.0)


def noted_by_rewards(progress: TrainingProgress, notes: str) -> dict[str, float]:
    """Return weights that any other reward would change, and append them to the file `notes` with the steps done."""
    weights = {name: 0.1 + math.fmod(7.0 * sum(each.rewards), 1.0) for name, each in progress.sets.items()}
    with Path(notes).open("a") as file:
        file.write(json.dumps([progress.steps, weights]) + "\n")
    return weights
