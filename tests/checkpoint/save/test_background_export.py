"""The export child: niced, under a lease that retention respects, and never the run's failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.checkpoint.save import background_export as export_job
from megarl.checkpoint.save.background_export import NICENESS, BackgroundExport
from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.trainer.batch import TrainSample
from tests.support.checkpoints.sample_checkpoints import make_checkpoint
from tests.support.models.tensors import read_hf
from tests.support.pool.pool import pool_config
from tests.support.worlds.world import World


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[BackgroundExport, list[str], Any]:
    """A job, what it says, and a function that sets the program which stands for the converter."""
    config = pool_config(tmp_path, tmp_path / "model")
    said: list[str] = []
    job = BackgroundExport(config.run_dir, CheckpointDirectory(config.checkpoint_dir), said.append)
    for step in (2, 4):
        make_checkpoint(CheckpointDirectory(config.checkpoint_dir), step)

    def runs(program: str) -> None:
        monkeypatch.setattr(export_job, "convert_command", lambda path, out: [sys.executable, "-c", program, str(out)])

    return job, said, runs


def test_it_is_niced_leased_and_one_at_a_time(job: tuple[BackgroundExport, list[str], Any], tmp_path: Path) -> None:
    export, said, runs = job
    directory = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    gate = tmp_path / "gate"
    program = f"import os, sys, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    runs(program + "open(sys.argv[1], 'w').write(str(os.nice(0)))")
    export.start(2)
    assert directory.leased() == {2} and said == []
    export.start(4)
    assert said == ["no Hugging Face export of step 4: that of step 2 is still running"]
    gate.touch()
    export.wait(60)
    assert (tmp_path / "run" / "hf_2").read_text() == str(min(19, os.nice(0) + NICENESS))
    assert directory.leased() == set()


def test_it_ends_with_the_rank_that_started_it() -> None:
    rank = (
        "import subprocess, time; from pathlib import Path\n"
        "from megarl.checkpoint.save.background_export import convert_command\n"
        "command = convert_command(Path('checkpoint'), Path('out'))\n"
        "command[2] = command[2].replace('sys.exit(main())', 'print(1, flush=True); import time; time.sleep(600)')\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"  # it has imported what it watches with
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    assert child.is_running()
    process.kill()
    process.wait(60)
    child.wait(60)  # TimeoutExpired if it lives on


def test_its_failure_and_its_hanging_are_said(job: tuple[BackgroundExport, list[str], Any]) -> None:
    export, said, runs = job
    runs("raise SystemExit(3)")
    export.start(2)
    export.wait(60)
    assert len(said) == 1 and "step 2 failed (code 3)" in said[0] and "hf-export.log" in said[0]
    runs("import time; time.sleep(600)")
    export.start(4)
    export.wait(0.5)
    assert "did not end within" in said[1]


@pytest.mark.slow  # it starts the converter
@pytest.mark.world
def test_the_converter_exports_a_saved_step(
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
    tmp_path: Path,
) -> None:
    [result] = world(1).run(
        "tests.support.ranks.checkpoints.saving:export",
        timeout=180,
        model_dir=model_dir("dense"),
        samples=samples_of("dense"),
        root=tmp_path,
    )
    assert result["said"] == []
    exported = read_hf(tmp_path / "hf_1")
    assert exported.keys() == result["weights"].keys()
    assert all(torch.equal(value, result["weights"][name]) for name, value in exported.items())
    assert (tmp_path / "hf_1" / "config.json").is_file() and (tmp_path / "hf_1" / "tokenizer.json").is_file()
