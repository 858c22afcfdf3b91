"""A RUN_DIR that is full for a time ends no group, no evaluation and no call of the trainer."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.formats import Prompt
from megarl.common.rundir.notices import notices_file
from megarl.rollout.engine.messages import SamplingSpec
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile, groups_started
from megarl.rollout.tasks.prompts import EvalSet, PromptTask
from tests.support.rollout.fake_rollout import local_controller
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
WAIT_S = 5.0


class Disk:
    """Takes nothing while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        for place, name in ((JournalFile, "count"), (Path, "replace")):
            monkeypatch.setattr(place, name, self._guarded(getattr(place, name)))

    def _guarded(self, real: Any) -> Any:
        def write(where: Any, content: Any) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(where, content)

        return write


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def eval_sets() -> list[EvalSet]:
    spec = SamplingSpec.greedy(8, (2,))
    problem = PromptTask(Prompt(0, [{"role": "user", "content": "3 + 4?"}], "7", {}), [1, 2], spec, "dev")
    return [EvalSet("dev", [problem] * 3, spec, samples=2)]


def notices(run_dir: Path) -> list[str]:
    return [json.loads(line)["text"] for line in notices_file(run_dir).read_text().splitlines()]


async def test_groups_go_on_and_their_number_is_written_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    (tmp_path / "logs").mkdir()
    settings = config_of(
        "model",
        batch={"groups": GROUPS, "samples_per_group": SAMPLES},
        admission={"refill": True},
    )
    local = local_controller(settings, tmp_path, monkeypatch)
    local.rewards.script = {group + 1: [0.0, 1.0] for group in range(1, 20)}  # group 0 is replaced, in the background
    controller = local.controller
    disk.full = True
    await controller.set_version(0)
    batch = await controller.wait_batch(0, WAIT_S)
    assert batch.replaced == [0] and groups_started(tmp_path / JOURNAL_FILE) == 0
    await controller.commit(0, trained=GROUPS, filtered=1, dropped_stale=0, failed=0)
    disk.full = False
    await controller.set_version(1)
    assert groups_started(tmp_path / JOURNAL_FILE) == 2 * GROUPS + 1
    await controller.wait_batch(1, WAIT_S)
    await controller.shutdown()


@pytest.mark.parametrize("alongside", [False, True])
async def test_an_evaluation_ends_and_the_user_is_warned_of_its_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, alongside: bool
) -> None:
    (tmp_path / "logs").mkdir()
    local = local_controller(config_of("model", rollout__max_num_seqs=20), tmp_path, monkeypatch)
    controller = local.controller
    controller._source.eval_sets = eval_sets  # type: ignore[method-assign]
    path = tmp_path / "eval_step_2.jsonl"
    disk.full = True
    if alongside:
        await controller.start_evaluation(4, "step_2")
        assert await controller.take_evaluations(WAIT_S)
    else:
        assert await controller.evaluate(4, "step_2")
    disk.full = False
    await controller.evaluate(5, "after")
    await controller.shutdown()
    assert not path.exists() and list(tmp_path.glob(".eval_*")) == []
    assert (tmp_path / "eval_after.jsonl").read_text().splitlines()
    [reported] = notices(tmp_path)
    assert f"{path} could not be written" in reported and "No space left" in reported
