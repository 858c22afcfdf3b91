"""`never` and a path hold for the first start of a launch; what torchrun or SLURM starts again goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.checkpoint.save.resume_point import config_of_this_start, remember_launch, same_launch
from megarl.config.schema import Config
from tests.support.checkpoints.sample_checkpoints import make_checkpoint
from tests.support.pool.pool import pool_config

FIRST = {"launch": "a", "job": "7", "agent": ["host", 1, 2]}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    for name in ("MEGARL_LAUNCH_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return lambda resume: pool_config(tmp_path, tmp_path / "model", checkpoint={"resume": resume})


@pytest.mark.parametrize("resume", ["never", "elsewhere/iter_0000003"])
def test_a_restart_goes_on_from_its_own_checkpoint(
    config: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    wanted = config(resume)
    directory = CheckpointDirectory(wanted.checkpoint_dir)
    make_checkpoint(directory, 2)
    assert config_of_this_start(wanted) is wanted  # of an earlier launch
    remember_launch(wanted.run_dir)
    assert config_of_this_start(wanted).checkpoint.resume == "auto"
    assert config_of_this_start(config("auto")).checkpoint.resume == "auto"
    directory.delete(2)
    assert config_of_this_start(wanted) is wanted  # killed before its first checkpoint: from the beginning again
    make_checkpoint(directory, 2)
    monkeypatch.setenv("MEGARL_LAUNCH_ID", "another")
    assert config_of_this_start(wanted) is wanted


def test_a_requeued_job_goes_on(config: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config("never")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MEGARL_LAUNCH_ID", "7-0")
    remember_launch(wanted.run_dir)
    make_checkpoint(CheckpointDirectory(wanted.checkpoint_dir), 2)
    monkeypatch.setenv("MEGARL_LAUNCH_ID", "7-1")
    assert config_of_this_start(wanted) is wanted  # started by hand once more, in the same allocation
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert config_of_this_start(wanted).checkpoint.resume == "auto"


@pytest.mark.parametrize(
    ("changes", "requeued", "same"),
    [
        ({}, False, True),
        ({"launch": "b"}, False, False),
        ({"launch": "b"}, True, True),
        ({"launch": "b", "job": "8"}, True, False),
        ({"launch": "b", "job": None}, True, False),
        ({"launch": None}, False, False),
    ],
)
def test_what_one_launch_is(changes: dict[str, Any], requeued: bool, same: bool) -> None:
    assert same_launch(FIRST, {**FIRST, **changes}, requeued=requeued) == same


def test_without_a_launch_script_the_agent_tells() -> None:
    alone = {**FIRST, "launch": None}
    assert same_launch(alone, alone, requeued=False)
    assert not same_launch(alone, {**alone, "agent": ["host", 1, 3]}, requeued=False)
    assert not same_launch(FIRST, alone, requeued=False)
