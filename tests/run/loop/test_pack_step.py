"""Samples that are packed before their step: what an update would pack, bit for bit, without asking for lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objective.aggregation import GlobalCounts
from megarl.config.schema import Config
from megarl.queue.streams import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, SOURCES
from megarl.queue.trajectory import Trajectory
from megarl.run.loop.pack_step import pack_step
from megarl.run.step.plan import StepPlan, plan_step
from megarl.run.step.step import train_samples
from megarl.trainer.batch import MicroBatch, TrainSample
from megarl.trainer.packed_batch import PackedStep, Packer, SampleShape
from tests.support.rollout.declared_streams import WEIGHT, declared
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.recorded_steps import make_batch

Gather = Callable[[str], Sequence[str]]
VOCAB = 100


def packer_of(config: Config, *, stages: int = 1, align: int = 1) -> Packer:
    return Packer(VOCAB, config.sampling.max_tokens, config.trainer.token_limit, stages, stages > 1, align)


def packed_on_all(
    packer: Packer, plan: StepPlan, rows: Sequence[Trajectory], config: Config, replicas: int
) -> list[PackedStep]:
    """Return the packed step of each replica; all are told what each of them says."""
    by_key = {row.key: row for row in rows}
    said: list[str] = []

    def pack(replica: int, gather: Gather) -> PackedStep:
        return pack_step(packer, plan, by_key, config, replica=replica, gather=gather)

    for replica in range(replicas):
        pack(replica, lambda own: said.append(own) or [own] * replicas)  # type: ignore[func-returns-value]
    return [pack(replica, lambda own: said) for replica in range(replicas)]


def same(one: MicroBatch, other: MicroBatch) -> bool:
    """Equal to the bit, data types and all streams included."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        return bool(a == b)

    return all(equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(MicroBatch))


@settings(deadline=None, max_examples=40)
@given(
    step=st.integers(0, 30),
    replicas=st.integers(1, 3),
    mini_batches=st.integers(1, 3),
    stages=st.sampled_from([1, 2]),
    align=st.sampled_from([1, 2]),
    limit=st.sampled_from([24, 40, 1000]),
)
def test_it_is_what_the_update_would_pack(
    step: int, replicas: int, mini_batches: int, stages: int, align: int, limit: int
) -> None:
    """The update tells the replicas its samples' lengths; here they are those of the tags."""
    config = config_of(
        "model", trainer__mini_batches=mini_batches, trainer__micro_batch_tokens=limit, sampling__max_tokens=12,
        algorithm__kl__coef=0.1, sampling__truncated="mask",
    )  # fmt: skip
    rows = make_batch(step)
    packer = packer_of(config, stages=stages, align=align)
    plan = plan_step([row.tag for row in rows], config, dp_size=replicas, version=rows[0].versions[0].version)
    assert plan.mini_batches
    ahead = packed_on_all(packer, plan, rows, config, replicas)
    late = [train_samples(plan, {row.key: row for row in rows}, config, replica) for replica in range(replicas)]
    for samples in late + [each.samples for each in ahead]:
        for sample in samples.values():
            number = len(sample.response_ids)
            sample.set_advantage(float(sample.length))
            sample.streams[REFERENCE_LOGPROBS] = torch.arange(number, dtype=torch.float32) / 7
    for number, parts in enumerate(plan.mini_batches):
        mine = [[late[replica][key] for key in part] for replica, part in enumerate(parts)]
        shapes = [[SampleShape.of(sample) for sample in part] for part in mine]
        for replica in range(replicas):
            streams = [ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, SOURCES]
            expected = packer.pack(mine[replica], shapes, replica, streams)
            found = ahead[replica].updates[number]
            samples = [ahead[replica].samples[key] for key in parts[replica]]
            batches = found.complete(samples, torch.device("cpu"))
            assert len(batches) == len(expected.micro_batches)
            assert all(same(a, b) for a, b in zip(batches, expected.micro_batches, strict=True))
            assert replace(found, micro_batches=[], late=()) == replace(expected, micro_batches=[])
    together = [[SampleShape.of(sample) for sample in samples.values()] for samples in late]
    for replica in range(replicas):
        whole = ahead[replica].whole
        assert whole is not None
        assert whole.indices == packer.pack(list(late[replica].values()), together, replica, []).indices


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({}, False),  # there is no pass
        ({"algorithm__kl__coef": 0.1}, True),
    ],
)
def test_passes_over_the_whole_step_are_packed_if_there_are_any(changes: dict[str, Any], packed: bool) -> None:
    config = config_of("model", sampling__max_tokens=12, **changes)
    rows = make_batch(0)
    plan = plan_step([row.tag for row in rows], config, dp_size=1, version=0)
    [found] = packed_on_all(packer_of(config), plan, rows, config, 1)
    assert (found.whole is not None) is packed


def weighed(rows: Sequence[Trajectory], without: str = "") -> list[Trajectory]:
    return [
        row if row.key == without else replace(row, streams={WEIGHT.name: [0.5] * len(row.response_ids)})
        for row in rows
    ]


@pytest.mark.parametrize("missing", [False, True])
def test_a_stream_is_packed_if_all_samples_of_all_replicas_have_it(missing: bool) -> None:
    config = config_of("model", sampling__max_tokens=12)
    rows = make_batch(0)
    plan = plan_step([row.tag for row in rows], config, dp_size=2, version=0)
    lacking = plan.mini_batches[0][1][0] if missing else ""
    with declared():
        both = packed_on_all(packer_of(config), plan, weighed(rows, lacking), config, 2)
    names = {name for each in both for batch in each.updates[0].micro_batches for name in batch.streams}
    assert names == {OLD_LOGPROBS, SOURCES} | (set() if missing else {WEIGHT.name})


def test_a_replica_without_samples_packs_the_same_streams() -> None:
    """One group of two samples is split over three replicas."""
    config = config_of("model", sampling__max_tokens=12, algorithm__filter_zero_variance=False)
    rows = make_batch(0)[:2]
    plan = plan_step([row.tag for row in rows], config, dp_size=3, version=0)
    [empty] = [replica for replica in range(3) if not plan.keys_of(replica)]
    with declared():
        packed = packed_on_all(packer_of(config), plan, weighed(rows), config, 3)
    [batch] = packed[empty].updates[0].micro_batches
    assert batch.is_empty and batch.streams[WEIGHT.name].tolist() == [WEIGHT.fill]
    assert packed[empty].updates[0].counts == GlobalCounts.of([len(row.response_ids) for row in rows], 12)


def test_a_sample_that_is_not_the_one_of_its_tag_is_refused() -> None:
    """The other replicas have planned with the tag, and would run another number of micro-batches."""
    config = config_of("model", sampling__max_tokens=12)
    rows = make_batch(0)
    plan = plan_step([row.tag for row in rows], config, dp_size=1, version=0)
    key = plan.keys_of(0)[3]
    longer = [replace(row, prompt_ids=[*row.prompt_ids, 7]) if row.key == key else row for row in rows]
    with pytest.raises(ValueError, match=f"sample {key} has .* but all replicas count"):
        packed_on_all(packer_of(config), plan, longer, config, 1)


def test_a_step_without_anything_to_train_packs_nothing_and_asks_all_the_same() -> None:
    config = config_of("model", sampling__max_tokens=12)
    rows = [replace(row, reward=1.0) for row in make_batch(0)]
    plan = plan_step([row.tag for row in rows], config, dp_size=1, version=0)
    asked: list[str] = []
    packed = pack_step(
        packer_of(config),
        plan,
        {},
        config,
        replica=0,
        gather=lambda own: [asked.append(own) or own],  # type: ignore[func-returns-value]
    )
    assert packed == PackedStep({}) and [json.loads(each) for each in asked] == [[]]


def test_another_number_of_samples_than_was_packed_is_refused() -> None:
    sample = TrainSample("0:0", [1], [2])
    packed = Packer(VOCAB, 12, 100, 1, False, 1).pack([sample], [[SampleShape(2, 1)]], 0, [])
    with pytest.raises(ValueError, match="1 samples were packed, but 2 are to be used"):
        packed.complete([sample, sample], torch.device("cpu"))
