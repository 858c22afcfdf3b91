"""`megarl train` becomes torchrun with the ranks of the config; `megarl convert` is the converter."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.convert import cli as command_line
from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cli import main
from megarl.common.rundir.run_files import ExitRecord, write_exit
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
from megarl.config.derived import pools
from megarl.config.loading.load import load_config
from megarl.run.start import main as rank_main
from tests.support.checkout import ROOT
from tests.support.checkpoints.sample_checkpoints import make_checkpoint
from tests.support.checkpoints.tree import tree_of
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import tree, write_problems


class Became(Exception):
    """The process would have become this command."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def become(path: str, command: list[str]) -> None:
        raise Became(path, *command)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(RUN_DIR_VARIABLE, "")
    path = tmp_path / "run.yaml"
    data = write_problems(tmp_path / "p.jsonl", 64)
    # Imported, and not called: what its calls do is for other tests.
    reward = {"function": "tests.support.rewards.reward_functions:digit_share", "trial_call": False}
    path.write_text(json.dumps(tree(make_tiny_model(tmp_path / "model"), data, reward=reward)))
    return path


def test_it_becomes_torchrun_with_the_ranks_of_the_config(config: Path) -> None:
    given = ["--config", str(config), "--resume", "never", "--dump-batches", "trainer.gpus=2", "run.steps=3"]
    with pytest.raises(Became) as became:
        main.main(["train", *given])
    python, *arguments = became.value.args[1:]
    assert python == became.value.args[0] == sys.executable
    torchrun = ["-m", "megarl.cluster.torchrun.run", "--rdzv-backend", "megarl", "--log-dir", "/dev/null"]
    torchrun += ["--shutdown-timeout", "900"]
    assert arguments == [*torchrun, "--nproc-per-node", "2", "-m", "megarl", "train", *given]
    assert os.environ[RUN_DIR_VARIABLE] == str(load_config(config).run_dir.resolve())  # for what only torchrun sees


def test_a_run_of_several_nodes_is_not_started_here(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "resolve_pools", lambda config: SimpleNamespace(nodes=4))
    assert main.main(["train", "--config", str(config)]) == 2
    assert f"the config needs 4 nodes; start it by: megarl launch --config {config}" in capsys.readouterr().err


def test_a_rank_of_it_does_what_a_rank_does(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(rank_main, "main", seen.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(["train", "--config", str(config), "run.steps=3"]) == 0
    assert seen == [["--config", str(config), "run.steps=3"]]


def test_a_path_on_the_command_line_that_is_not_there_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe plans without its own files; a path that the user has typed is meant to be there."""
    monkeypatch.chdir(ROOT)
    given = ["--config", "examples/rl/configs/qwen3_8b_gsm8k_8.yaml"]
    absent = f"no such file or directory: {tmp_path / 'nope'} (on the command line; current directory: {ROOT})"
    sets = f"evaluation.sets=[{{name: own, path: {tmp_path / 'nope'}}}]"
    for key, override in {
        "model.path": f"model.path={tmp_path / 'nope'}",
        "data.path": f"data.path={tmp_path / 'nope'}",
        "evaluation.sets.0.path": sets,
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main.main(["train", *given, override, "--dry-run"])
        reported = capsys.readouterr()
        fix = "correct it, or plan without files: megarl plan --no-files"
        assert reported.err == f"megarl: {key}: {absent}; {fix}\n" and reported.out == ""
    assert main.main(["plan", *given, f"model.path={tmp_path / 'nope'}"]) == 2
    capsys.readouterr()
    assert main.main(["plan", *given, f"model.path={tmp_path / 'nope'}", "--no-files"]) == 0


def test_a_run_that_has_finished_is_not_started_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    checkpoint = make_checkpoint(CheckpointDirectory(run_dir / "checkpoints"), 4)
    (run_dir / "hf").mkdir()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    write_exit(run_dir, ExitRecord("finished", 4, ""))
    before = tree_of(run_dir)
    given = ["--config", str(config), f"run.dir={run_dir}"]
    for start in (["train", *given], ["launch", "--scheduler", "local", *given]):
        capsys.readouterr()
        assert main.main(start) == 0
        reported = capsys.readouterr().err
        assert reported.startswith(
            f"megarl: already finished: 4 of 4 steps in {run_dir}; nothing was started or moved."
        )
        assert "raise run.steps" in reported and "checkpoint.resume=never" in reported
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert main.main(["train", *given]) == 0 and capsys.readouterr().err == "", "a rank of a bare torchrun"
    assert tree_of(run_dir) == before
    monkeypatch.delenv("WORLD_SIZE")
    for change in ("run.steps=5", "checkpoint.resume=never"):
        with pytest.raises(Became):
            main.main(["train", *given, change])
    with pytest.raises(Became):
        main.main(["train", *given, "--resume", "never"])
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(Became):
        main.main(["train", *given])


@pytest.mark.parametrize("start", ["megarl convert", "convert.py"])
def test_the_converter_calls_itself_as_it_was_started(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int | str | None, str]:
        command = ["convert"] if start == "megarl convert" else []
        try:
            status: int | str | None = (main.main if command else command_line.main)([*command, *arguments])
        except SystemExit as ended:
            status = ended.code
        reported = capsys.readouterr()
        return status, " ".join((reported.out + reported.err).split())

    status, reported = run("--help")
    assert status == 0 and reported.startswith(f"usage: {start} [-h]")
    assert run("inspect", "--help")[1].endswith(f"example: {start} inspect Qwen3-8B-megatron")
    status, reported = run("inspect", str(tmp_path / "gone"))
    assert status == 1 and reported.startswith(f"{start}: {tmp_path / 'gone'}")
    status, reported = run("import")
    assert status == 2 and f"{start} import: error: " in reported
