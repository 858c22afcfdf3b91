"""`megarl launch` chooses the scheduler and becomes the local script, which decides what stop signals mean."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import launch, main
from tests.support.checkout import environment
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import tree, write_problems

# A script as launch/local.sh: it traps the signals, and ends in its own time.
SCRIPT = """
trap 'echo INT; asked=1' INT
trap 'echo TERM; asked=1' TERM
echo up
until [ -n "$asked" ]; do sleep 0.1; done
sleep 1; echo saved; exit 7
"""
# A shell lets its background jobs ignore SIGINT, and with them whatever runs the tests there.
LAUNCH = (
    "import signal, sys; from megarl.cli.launch import run_script; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(run_script(['bash', '-c', sys.argv[1]]))"
)


@pytest.mark.parametrize(
    ("to_group", "number", "name"), [(True, signal.SIGINT, "INT"), (False, signal.SIGTERM, "TERM")]
)
def test_the_script_ends_in_its_own_time(to_group: bool, number: signal.Signals, name: str) -> None:
    """Ctrl-C sends SIGINT to the whole group, and a SIGTERM goes to the command alone, which has become the script."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, SCRIPT], env=environment(), text=True, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.communicate(timeout=120)[0].split() == [name, "saved"]
        assert process.returncode == 7
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`megarl launch` of a config that can run, where the PATH is the directory `bin` of `tmp_path` alone."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path = tmp_path / "run.yaml"
    data = write_problems(tmp_path / "prompts.jsonl", 64)
    path.write_text(json.dumps(tree(make_tiny_model(tmp_path / "model"), data, run__dir=str(tmp_path / "run"))))
    return ["launch", "--config", str(path), "--device", "cpu"]


def add_sbatch(directory: Path, script: str) -> None:
    (directory / "bin" / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "bin" / "sbatch").chmod(0o755)


@pytest.mark.parametrize(("there", "command"), [(True, "sbatch train.sbatch"), (False, "bash local.sh")])
def test_slurm_is_the_default_where_sbatch_is(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, command: str
) -> None:
    started: list[list[str]] = []

    def start(command: list[str]) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(launch, "run_script", start)
    if there:
        add_sbatch(tmp_path, "exit 0")
    assert main.main(arguments) == 0
    ((program, script),) = started
    assert f"{program} {Path(script).name}" == command


HINT = "megarl: sbatch failed; for this machine: --scheduler local\n"


def test_a_failing_sbatch_that_nobody_asked_for_is_reported_with_the_way_to_run_here(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine may have the command and belong to no cluster."""
    add_sbatch(tmp_path, "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    assert main.main(arguments) == 1
    assert capfd.readouterr().err == f"sbatch: fatal: Could not establish a configuration source\n{HINT}"
    assert main.main([*arguments, "--scheduler", "slurm"]) == 1
    assert HINT not in capfd.readouterr().err
    add_sbatch(tmp_path, "exit 0")
    assert main.main(arguments) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("absent", ["model", "prompts.jsonl"])
def test_a_dry_run_for_this_machine_refuses_absent_files_as_that_of_train_does(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], absent: str
) -> None:
    (tmp_path / absent).rename(tmp_path / "elsewhere")
    local = [*arguments, "--scheduler", "local", "--dry-run"]
    capsys.readouterr()  # what making the model has shown
    with pytest.raises(SystemExit) as ended:
        main.main(["train", "--config", arguments[2], "--dry-run"])
    assert ended.value.code == 2
    refused = capsys.readouterr().err
    assert "no such" in refused and str(tmp_path / absent) in refused
    assert main.main(local) == 2
    assert capsys.readouterr() == ("", refused)


def test_a_dry_run_for_this_machine_checks_the_data_and_can_be_told_not_to(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = [*arguments, "--scheduler", "local", "--dry-run"]
    capsys.readouterr()
    assert main.main(local) == 0
    message = capsys.readouterr()
    assert message.out.startswith("#!") and "# resolved config" in message.err
    (tmp_path / "prompts.jsonl").write_text("no\n")
    assert main.main(local) == 2
    assert "prompts.jsonl:1:1: not JSON" in capsys.readouterr().err
    assert main.main([*local, "--no-files"]) == 0
    assert capsys.readouterr().out == message.out


SUBMITTED = "Submitted batch job 7\n"


@pytest.fixture
def slurm(arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """`megarl launch --scheduler slurm` where sbatch says that it has the job."""
    add_sbatch(tmp_path, f"echo '{SUBMITTED.strip()}'")
    capfd.readouterr()  # what making the model has shown
    return [*arguments, "--scheduler", "slurm"]


@pytest.mark.parametrize(
    ("row", "function", "message"),
    [
        ("no", "math", "prompts.jsonl:1:1: not JSON"),
        (
            '{"problem": "1+1=?", "answer": "2"}',
            "absent",
            "has no attribute 'absent'",
        ),
        (
            '{"problem": "1+1=?", "answer": "none"}',
            "by_response",
            "a reward must be a number or a RewardResult, not None",
        ),
    ],
)
def test_no_job_is_submitted_with_data_or_a_reward_that_cannot_be_used(
    slurm: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], row: str, function: str, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(f"{row}\n")
    own = [] if function == "math" else [f"reward.function=tests.support.rewards.reward_functions:{function}"]
    for more in ([], ["--dry-run"]):
        assert main.main([*slurm, *own, *more]) == 2
        refused = capfd.readouterr()
        assert message in refused.err and refused.out == ""
        assert ("--no-files of `megarl plan` and `megarl launch`, if only" in refused.err) == bool(own)
    assert not (tmp_path / "run").exists()
    assert main.main([*slurm, *own, "--no-files"]) == 0
    assert capfd.readouterr() == (SUBMITTED, "")


def test_a_job_is_submitted_with_data_that_are_here_and_the_dry_run_says_what_it_left_out(
    slurm: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(slurm) == 0
    assert capfd.readouterr() == (SUBMITTED, "")
    assert main.main([*slurm, "--dry-run"]) == 0
    message = " ".join(capfd.readouterr().err.split())
    assert "not here" not in message
    left = "tokenizer and chat template, lengths of the prompts, weights, the checkpoint to resume from"
    assert message.endswith(f"note: not checked here, only where the run starts: {left}")
    (tmp_path / "prompts.jsonl").rename(tmp_path / "elsewhere")
    assert main.main([*slurm, "--dry-run"]) == 0
    message = " ".join(capfd.readouterr().err.split())
    assert f"needed where the run starts: data.path ({tmp_path / 'prompts.jsonl'})" in message
    assert "reward.function: imported but not called, because data.path is not here" in message


def test_a_reward_that_may_fail_is_a_warning_and_the_job_is_submitted(
    slurm: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    broken = ["reward.function=tests.support.rewards.reward_functions:broken", "reward.on_error=0.0"]
    assert main.main([*slurm, *broken]) == 0
    submitted = capfd.readouterr()
    assert submitted.out == SUBMITTED
    assert submitted.err.startswith("megarl: warning: reward.function: a trial call of ")
    assert main.main([*slurm, *broken, "--dry-run"]) == 0
    assert "note: reward.function: a trial call of " in capfd.readouterr().err
