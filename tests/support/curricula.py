"""Curricula for tests of configs that name one."""

from __future__ import annotations

from megarl.data.curriculum import TrainingProgress


def equal_shares(progress: TrainingProgress) -> dict[str, float]:
    """Return the same weight for each set."""
    return dict.fromkeys(progress.sets, 1.0)
