"""Log-probs that are not finite come to the trainer, which decides: rollout neither hides nor counts them."""

import asyncio
import math
from pathlib import Path

import pytest

from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile
from megarl.rollout.resume.journal_records import read_head
from tests.support.rollout.damaged_engine import NanLogprobs
from tests.support.rollout.fake_rollout import local_controller
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 4
WAIT_S = 5.0


@pytest.mark.parametrize("policy", ["count", "stop"])
async def test_groups_without_a_good_sample_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    config = config_of(
        "model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, rollout={"on_group_failure": policy}
    )
    local = local_controller(config, tmp_path, monkeypatch, NanLogprobs([0, 1], GROUPS))
    for step in range(3):
        await local.controller.set_version(step)
        batch = await local.controller.wait_batch(step, WAIT_S)
        rows = [local.queue.rows[key] for key in batch.keys]
        assert len(rows) == GROUPS * SAMPLES
        assert {row.tag.bad_logprobs for row in rows} == {step < 2}
        if step < 2:
            assert all(row.response_ids and math.isnan(row.rollout_logprobs[-1]) for row in rows), "to be looked at"
        failed = GROUPS if step < 2 else 0
        await local.controller.commit(step, trained=GROUPS - failed, filtered=0, dropped_stale=0, failed=failed)
    await local.controller.shutdown()


async def test_a_group_with_a_bad_sample_is_not_replaced_as_one_without_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards of its other samples are equal, and the trainer would never see it."""
    config = config_of("model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, admission={"refill": True})
    local = local_controller(config, tmp_path, monkeypatch, NanLogprobs([0], GROUPS, samples=[1]))
    await local.controller.set_version(0)
    batch = await local.controller.wait_batch(0, WAIT_S)
    rows = [local.queue.rows[key] for key in batch.keys]
    assert batch.replaced == [] and sum(row.tag.bad_logprobs for row in rows) == GROUPS
    await local.controller.shutdown()


def test_a_run_that_is_started_again_draws_the_groups_with_bad_samples_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the same samples would stop it after every start. The group without one is used again."""
    batch = {"groups": GROUPS, "samples_per_group": SAMPLES}
    config = config_of("model", batch=batch, rollout={"journal_s": 0.01})

    def written() -> set[int]:
        path = tmp_path / JOURNAL_FILE
        heads = [read_head(record) for record in JournalFile(path).read()] if path.exists() else []
        return {head["group"] for head in heads if head["kind"] == "group"}

    async def stopped() -> None:
        damaged = NanLogprobs([0, 2], groups=1, samples=[1])
        local = local_controller(config, tmp_path, monkeypatch, damaged)
        await local.controller.begin(None)
        await local.controller.set_version(0)
        await local.controller.wait_batch(0, WAIT_S)
        assert {row.group_id for row in local.queue.rows.values() if row.has_bad_logprobs} == {0, 2}
        while written() != {0, 1, 2}:
            await asyncio.sleep(0.01)
        await local.controller.shutdown()

    async def started_again() -> None:
        local = local_controller(config, tmp_path, monkeypatch)
        await local.controller.begin(None)
        await local.controller.set_version(0)
        batch = await local.controller.wait_batch(0, WAIT_S)
        assert sorted(local.fleet.sent) == [0, 2]
        assert [local.queue.rows[key].status for key in batch.keys] == ["ok"] * GROUPS * SAMPLES
        assert "2 kept groups are drawn again: they have non-finite log-probs" in caplog.text
        await local.controller.shutdown()

    asyncio.run(asyncio.wait_for(stopped(), 30))
    asyncio.run(asyncio.wait_for(started_again(), 30))
