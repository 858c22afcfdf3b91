"""Every command that writes in a run directory is refused while another run holds it, and changes no byte there."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.cli import train as train_command
from megarl.cluster.nodes.__main__ import main as launch_step
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, Sighting, claim
from megarl.run.start import main as trainer
from tests.support.checkout import ROOT
from tests.support.checkpoints.tree import tree_of
from tests.support.trainer.configs import tree, write_problems


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The directory of a living run, with results in it."""
    directory = tmp_path / "run"
    (directory / "launch").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "exit.json").write_text('{"status": "preempted", "step": 1, "reason": "x"}')
    (directory / "launch" / "local.sh").write_text("sleep 1000\n")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    claim(directory, Holder.here("torchrun", ProcessId.of(process.pid)), node_s=1.0)
    yield directory
    process.kill()
    process.wait(timeout=60)


@pytest.fixture
def config(model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run in that directory, in the environment of a rank that torchrun has started."""
    path = run_dir.with_name("config.yaml")
    data = write_problems(run_dir.with_name("prompts.jsonl"), 1)
    timeouts = {"node_s": 1.0}  # a start with --force waits that long for a holder that does not end
    path.write_text(json.dumps(tree(model, data, run__dir=str(run_dir), timeouts=timeouts)))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    monkeypatch.chdir(ROOT)
    return path


def train(config: Path, run_dir: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        trainer.main(["--config", str(config)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def launch(config: Path, run_dir: Path) -> int:
    return main.main(["launch", "--scheduler", "local", "--config", str(config)])


def prepare(config: Path, run_dir: Path) -> int:
    return launch_step(["prepare", "--scheduler", "local", "--config", str(config)])


def evaluate(config: Path, run_dir: Path) -> int:
    content = json.loads(config.read_text())
    model, data = content["model"]["path"], content["data"]["path"]
    return main.main(["eval", "--model", model, "--data", data, "--max-tokens", "8", "--run-dir", str(run_dir)])


def serve(config: Path, run_dir: Path) -> int:
    model = json.loads(config.read_text())["model"]["path"]
    return main.main(["serve", "--model", model, "--run-dir", str(run_dir)])


def replay(config: Path, run_dir: Path) -> int:
    """Replay a run into the directory of another one that lives."""
    recorded = run_dir.with_name("recorded")
    recorded.joinpath("batches").mkdir(parents=True)
    recorded.joinpath("config.yaml").write_text(config.read_text())
    recorded.joinpath("batches", "step_000001.0-of-1.parquet").touch()
    return main.main(["replay", "--run-dir", str(recorded), "--out", str(run_dir)])


@pytest.mark.parametrize("start", [train, launch, prepare, evaluate, serve, replay])
def test_a_second_start_in_a_living_runs_directory_changes_nothing(
    config: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], start: Callable[[Path, Path], int]
) -> None:
    before = tree_of(run_dir)
    assert start(config, run_dir) == 2
    error = capsys.readouterr().err
    assert error.count("is in use by torchrun (pid ") == 1 and "nothing was changed" in error
    assert tree_of(run_dir) == before


def test_force_takes_the_directory_of_a_living_run(config: Path, run_dir: Path) -> None:
    assert launch_step(["prepare", "--scheduler", "local", "--config", str(config), "--force"]) == 0
    seen = Sighting.of(run_dir)
    assert seen is not None and seen.holder.what == "megarl launch"
    options = main.build_parser().parse_args(["train", "--config", str(config), "--force"])
    options.arguments = ["--config", str(config), "--force"]
    command = train_command.torchrun_command(options)
    assert command is not None and command[-1] == "--force"


@pytest.mark.parametrize(("restarts", "code"), [(0, 0), (1, 2)])
def test_a_job_that_is_queued_again_does_not_repeat_force(
    config: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, code: int
) -> None:
    """Somebody may have started another run in its place meanwhile."""
    answers = {"scontrol": "127.0.0.1\n", "squeue": "1:00:00\n"}
    monkeypatch.setattr("megarl.cluster.nodes.prepare._query", lambda *command: answers[command[0]])
    for name, value in {"JOB_ID": "77", "JOB_NODELIST": "here", "RESTART_COUNT": str(restarts)}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    before = Sighting.of(run_dir)
    assert launch_step(["prepare", "--scheduler", "slurm", "--config", str(config), "--force"]) == code
    assert (Sighting.of(run_dir) == before) is bool(restarts)
