"""The trajectories of a few steps, the same ones at every call, for a run that was recorded and is replayed."""

import random
from dataclasses import replace

import torch

from megarl.queue.trajectory import Trajectory, VersionSpan

STEPS, GROUPS, SAMPLES = 3, 4, 3
UPDATES = 2  # mini-batches of a step


def version_of(step: int) -> int:
    """Return the version of the weights that a step of the run updates."""
    return step * UPDATES


def make_batch(step: int) -> list[Trajectory]:
    """Ragged trajectories with random log-probs near -4.6 (the tiny model is nearly uniform), one failed, one cut."""
    draw = random.Random(step)
    rows = []
    for group in range(step * GROUPS, (step + 1) * GROUPS):
        prompt = [draw.randrange(5, 90) for _ in range(draw.randint(2, 6))]
        for index in range(SAMPLES):
            length = draw.randint(2, 12)
            logprobs = torch.tensor([-4.6 + draw.random() for _ in range(length)]).tolist()
            failed = (group, index) == (1, 1)
            rows.append(
                Trajectory(
                    group_id=group,
                    sample_index=index,
                    prompt_ids=prompt,
                    response_ids=[draw.randrange(5, 90) for _ in range(length)],
                    rollout_logprobs=logprobs,
                    versions=(VersionSpan(version_of(step), 0, length),),
                    finish_reason="length" if index == 2 else "stop",
                    reward=float(index == group % SAMPLES),
                    status="failed" if failed else "ok",
                    failure="NaN" if failed else "",
                )
            )
    return rows


STALE, STALE_AND_FAILED = 4, 5  # groups of step 1 of `make_batch_with_drops`


def make_batch_with_drops(step: int) -> list[Trajectory]:
    """The trajectories of `make_batch`, but two groups have a token of the weights before the last publication.

    The trainer drops one of them as stale, and the other one has failed, because it has one usable sample left.
    """
    return [_changed(row, step) for row in make_batch(step)]


def _changed(row: Trajectory, step: int) -> Trajectory:
    if row.group_id in (STALE, STALE_AND_FAILED) and row.sample_index == 0:
        spans = (VersionSpan(version_of(step - 1), 0, 1), VersionSpan(version_of(step), 1, len(row.response_ids)))
        return replace(row, versions=spans)
    return replace(row, status="failed", failure="NaN") if row.group_id == STALE_AND_FAILED else row
