"""The division of a run's GPUs between trainer and rollout with which a step is shortest. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sides:
    """The two sides of a run as measured. Seconds are per step; GPUs are processes on a CPU.

    `trainer_fixed_s`: what a step of the trainer takes whatever its GPUs: weight sync, saves, the loop. `trainer_s`:
    passes and updates. `rollout_s`: time in which engines ran for a step. `trainer_unit`, `rollout_unit`: what each
    side can grow or shrink by: GPUs of one model-parallel replica. `in_turn`: each side waits while the other works.
    """

    trainer_gpus: int
    rollout_gpus: int
    trainer_unit: int
    rollout_unit: int
    trainer_fixed_s: float
    trainer_s: float
    rollout_s: float
    in_turn: bool = False

    def step_s(self, trainer_gpus: int, rollout_gpus: int) -> float:
        """Return the length of a step, at the same time or in turn, if both sides scale with their GPUs."""
        trainer = self.trainer_fixed_s + self.trainer_s * self.trainer_gpus / trainer_gpus
        rollout = self.rollout_s * self.rollout_gpus / rollout_gpus
        return trainer + rollout if self.in_turn else max(trainer, rollout)


@dataclass(frozen=True)
class Split:
    """A division of the same number of GPUs, and the step that it would take, as a share of the present one."""

    trainer_gpus: int
    rollout_gpus: int
    step_share: float


def best_split(sides: Sides) -> Split | None:
    """Return the division with the shortest step; None if no other is at least 3% shorter than the present one.

    The sum is the present one, or less where units do not divide it.
    """
    total = sides.trainer_gpus + sides.rollout_gpus
    now = sides.step_s(sides.trainer_gpus, sides.rollout_gpus)
    best: Split | None = None
    for trainer in range(sides.trainer_unit, total - sides.rollout_unit + 1, sides.trainer_unit):
        rollout = (total - trainer) // sides.rollout_unit * sides.rollout_unit
        share = sides.step_s(trainer, rollout) / now if now else 1.0
        if best is None or share < best.step_share:
            best = Split(trainer, rollout, share)
    return best if best is not None and best.step_share < 0.97 else None
