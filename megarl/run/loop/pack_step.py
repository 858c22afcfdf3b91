"""The samples of a step, packed for its updates by the thread that prepares the batch, while another step trains.

Every rank knows the lengths of all samples from their tags, so it plans the micro-batches of all replicas by itself.
Only the streams that the rollout side has made are agreed on, over the channel of that thread. What the step computes
from the weights or from all rewards (log-probs, advantages) is added when the updates begin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megarl.config.derived.logprob_passes import interpolates_proximal, logprob_passes, teacher_passes
from megarl.config.derived.teachers import distils_in_loss
from megarl.config.schema import Config
from megarl.queue.streams import ADVANTAGES, PROXIMAL_ALPHA, TEACHER_LOGPROBS
from megarl.queue.trajectory import Trajectory
from megarl.run.step.plan import StepPlan
from megarl.run.step.step import train_samples
from megarl.trainer.batch import TrainSample, agreed_streams, common_streams
from megarl.trainer.packed_batch import PackedBatch, PackedStep, Packer, SampleShape


def pack_step(
    packer: Packer,
    plan: StepPlan,
    rows: Mapping[str, Trajectory],
    config: Config,
    *,
    replica: int,
    gather: Callable[[str], Sequence[str]],
) -> PackedStep:
    """Make and pack the samples of one replica. Collective, through `gather`.

    `rows`: the replica's trajectories by key. `gather`: returns the texts of all replicas, each at least once. Raises
    ValueError if a sample is not the one that its tag tells.
    """
    samples = train_samples(plan, rows, config, replica)
    mine = [[samples[key] for key in parts[replica]] for parts in plan.mini_batches]
    alpha = [PROXIMAL_ALPHA] if interpolates_proximal(config) else []
    # Also of a mini-batch in which no row has them: the loss needs the stream.
    taught = [TEACHER_LOGPROBS] if teacher_passes(config) or distils_in_loss(config) else []
    late = (ADVANTAGES, *alpha, *logprob_passes(config), *taught)
    streams = _agreed_streams(mine, late, gather)
    shapes = _shapes(plan)
    updates = [packer.pack(part, shapes[number], replica, streams[number], late) for number, part in enumerate(mine)]
    return PackedStep(samples, updates, _whole(packer, mine, shapes, replica, updates, config))


def _shapes(plan: StepPlan) -> list[list[list[SampleShape]]]:
    """Return `[mini-batch][replica]` -> the shapes of its samples."""
    trained = {sample.key for group in plan.shaped.groups for sample in group if sample.trained}

    def shape(key: str) -> SampleShape:
        tag = plan.tags[key]
        return SampleShape(tag.total_tokens, tag.sampled_tokens if key in trained else 0)

    return [[[shape(key) for key in part] for part in parts] for parts in plan.mini_batches]


def _agreed_streams(
    mine: Sequence[Sequence[TrainSample]], late: Sequence[str], gather: Callable[[str], Sequence[str]]
) -> list[list[str]]:
    """Return for each mini-batch the `agreed_streams` of all replicas, without the late ones."""
    # For each mini-batch; None if this replica has no samples there.
    own = [common_streams(part) if part else None for part in mine]
    everyone: list[list[list[str] | None]] = [json.loads(text) for text in gather(json.dumps(own))]
    found = []
    for number in range(len(mine)):
        agreed = agreed_streams(streams for each in everyone if (streams := each[number]) is not None)
        found.append([name for name in agreed if name not in late])
    return found


def _whole(
    packer: Packer,
    mine: Sequence[Sequence[TrainSample]],
    shapes: Sequence[Sequence[Sequence[SampleShape]]],
    replica: int,
    updates: Sequence[PackedBatch],
    config: Config,
) -> PackedBatch | None:
    """Pack all samples of the step, if there is a pass over all of them."""
    if not updates or not logprob_passes(config):
        return None
    if len(updates) == 1:
        return replace(updates[0], late=())
    together = [[shape for parts in shapes for shape in parts[each]] for each in range(len(shapes[0]))]
    return packer.pack([sample for part in mine for sample in part], together, replica, [])
