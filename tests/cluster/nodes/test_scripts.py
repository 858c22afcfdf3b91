"""The launch scripts: what they ask for, and what the shell makes of them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.cluster.nodes.commands import directives, local_script, slurm_script
from megarl.config.loading.load import load_config
from tests.support.checkout import ROOT
from tests.support.trainer.configs import config

LOCAL = (ROOT / "launch/local.sh").read_text()
RECIPES = sorted(path.stem for path in (ROOT / "launch/slurm").glob("*.sbatch") if path.stem != "train")


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_script_asks_for_what_its_config_plans(name: str) -> None:
    """It holds nothing else but its config: the body is launch/slurm/job.sh."""
    path = Path(f"examples/rl/configs/{name}.yaml")
    lines = (ROOT / f"launch/slurm/{name}.sbatch").read_text().splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert asked == directives(load_config(ROOT / path), cuda=True)
    rest = [line for line in lines if line not in asked]
    assert rest == ["#!/usr/bin/env bash", "", f"config={path}", 'source "$SLURM_SUBMIT_DIR/launch/slurm/job.sh"']
    assert len(lines) <= 20


def test_values_with_spaces_are_quoted() -> None:
    """sbatch takes what follows a space as another option."""
    own = {"run__name": "exp 2", "launch__sbatch": ["--comment=a b", "--qos=x"]}
    asked = directives(config("model", "data.jsonl", **own), cuda=False)
    assert asked[0] == "#SBATCH --job-name='exp 2'" and asked[-2:] == ["#SBATCH --comment='a b'", "#SBATCH --qos=x"]


def test_every_recipe_has_a_script() -> None:
    """A recipe is a config with launch settings of its own."""
    paths = (ROOT / "examples/rl/configs").glob("*.yaml")
    assert sorted(path.stem for path in paths if "launch" in load_config(path).model_fields_set) == RECIPES


def test_every_script_is_valid_shell() -> None:
    scripts = (*ROOT.glob("launch/slurm/*"), *ROOT.glob("launch/*.sh"))
    assert len(scripts) > len(RECIPES)
    for path in scripts:
        shell = subprocess.run(["bash", "-n", str(path)], check=False, capture_output=True, text=True, timeout=20)
        assert (shell.returncode, shell.stderr) == (0, ""), path


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_before_the_agent_has_started_only_asks_to_stop(tmp_path: Path, name: str) -> None:
    before, agent, _ = LOCAL.partition('"$PYTHON" -m megarl.cluster.nodes.launcher')
    assert agent
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}/launch/1/launch.json\n")
    python.chmod(0o755)
    shell = subprocess.run(
        # A shell cannot trap a signal that was ignored when it began, as SIGINT is for what runs in the background.
        ["env", "--default-signal=INT", "bash", "-c", f"{before}\nkill -{name} $$\nexit 7", "local.sh", "config.yaml"],
        env={**os.environ, "PYTHON": str(python)}, check=False, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert (shell.returncode, shell.stderr) == (7, "megarl: finishing the step, saving; again to abort\n")
    assert (tmp_path / "stop").read_text() == f"SIG{name}\n"


def test_a_config_decides_everything() -> None:
    chosen = config(
        "model", run={"name": "mine", "steps": 4}, trainer={"gpus": 2, "gpus_per_node": 1},
        rollout={"replicas": 2, "gpus_per_node": 1, "nodes": "separate"},
        launch={"time_limit": "1-00:00:00", "stop_before_s": 650, "requeue": False,
                "sbatch": ["--account=x", "--cpus-per-task=24"], "setup": ["module load y"]},
    )  # fmt: skip
    text = slurm_script(chosen, Path("a b.yaml"), ["run.name=it's"])
    for line in ("#SBATCH --nodes=4", "#SBATCH --gpus-per-node=1", "#SBATCH --time=1-00:00:00", "#SBATCH --account=x",
                 "#SBATCH --signal=B:USR1@650", "#SBATCH --cpus-per-task=24", "#SBATCH --job-name=mine",
                 "requeue=no", "module load y", "config='a b.yaml'"):  # fmt: skip
        assert line in text.splitlines()
    assert "--exclusive" not in text
    assert "--gpus-per-node" not in slurm_script(chosen, Path("c.yaml"), cuda=False)
    assert text == slurm_script(chosen, Path("a b.yaml"), ["run.name=it's"])


# --- the shell part, with stand-ins for Python and SLURM that write down how they were called


STUB_PYTHON = """#!/bin/sh
echo "python $*" >>"$RECORD"
case "$3" in
  prepare) echo "$RUN/launch/1/launch.json";;
  status) echo "$STATUS"; echo "megarl: $STATUS" >&2;;
  *) sh -c "$NODE";;
esac
"""
STUB_CLIENT = """#!/bin/sh
name=${0##*/}
echo "$name $*" >>"$RECORD"
if [ "$name" = srun ]; then while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"; fi
"""


class Shell:
    """Runs a script with the stand-ins; `node`: what the agent does, in shell."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        (self.run_dir / "launch/1").mkdir(parents=True)
        for name, text in (("python", STUB_PYTHON), ("srun", STUB_CLIENT), ("scontrol", STUB_CLIENT)):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)

    def run(self, script: str, *arguments: str, status: str, node: str = "true") -> tuple[int, str, list[str]]:
        record = self.directory / "record"
        record.unlink(missing_ok=True)
        environment: dict[str, Any] = {
            **os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}", "RECORD": str(record), "STATUS": status,
            "RUN": str(self.run_dir), "NODE": node, "PYTHON": str(self.directory / "python"), "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": "4", "SLURM_SUBMIT_DIR": str(ROOT),
        }  # fmt: skip
        path = self.directory / "script.sh"
        path.write_text(script)
        done = subprocess.run(
            ["bash", str(path), *arguments], env=environment, cwd=ROOT, capture_output=True, text=True,
            timeout=30, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr, record.read_text().splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def four_nodes(**launch: Any) -> str:
    chosen = config(
        "model", trainer={"gpus": 2, "gpus_per_node": 1}, rollout={"replicas": 2, "gpus_per_node": 1}, launch=launch
    )
    return slurm_script(chosen, Path("c.yaml"), ["run.steps=3", "run.name=a b"], cuda=False)


def test_a_job_that_finishes(shell: Shell) -> None:
    code, _, calls = shell.run(four_nodes(), "run.seed=1", status="finished")
    assert code == 0
    assert calls[0].endswith(
        "prepare --scheduler slurm --signal-s 900 --config c.yaml run.steps=3 run.name=a b run.seed=1"
    )
    assert calls[1].startswith("srun --ntasks=4 --ntasks-per-node=1")
    assert calls[2] == f"python -m megarl.cluster.nodes.launcher {shell.run_dir}/launch/1/launch.json"
    assert len(calls) == 4 and "status" in calls[3]


def test_a_job_near_its_time_limit_asks_the_run_to_stop_and_is_queued_again(shell: Shell) -> None:
    # The agent's stand-in signals the script (its grandparent) and goes on until the ranks would have seen the file.
    node = f'kill -USR1 $(ps -o ppid= -p "$PPID"); until [ -e {shell.run_dir}/stop ]; do sleep 0.1; done'
    code, error, calls = shell.run(four_nodes(), status="preempted", node=node)
    assert (shell.run_dir / "stop").read_text() == "the time limit is near (SIGUSR1)\n", (error, calls)
    assert code == 0 and calls[-1] == "scontrol requeue 77"


@pytest.mark.parametrize(
    ("status", "requeue", "code"), [("preempted", False, 0), ("unsaved", True, 1), ("unsaved", False, 1)]
)
def test_a_job_that_could_not_save_its_stop_does_not_end_well_and_the_config_says_if_it_is_queued_again(
    shell: Shell, status: str, requeue: bool, code: int
) -> None:
    ended, _, calls = shell.run(four_nodes(requeue=requeue), status=status)
    assert ended == code and ("scontrol requeue 77" in calls) == requeue


def test_a_job_that_fails(shell: Shell) -> None:
    code, error, calls = shell.run(four_nodes(), status="failed", node="exit 1")
    assert code == 1 and "megarl: failed" in error and not any("requeue" in call for call in calls)


def test_local_scripts(shell: Shell) -> None:
    code, _, calls = shell.run(LOCAL, "my.yaml", "run.steps=9", status="finished")
    assert code == 0 and calls[0].endswith("prepare --scheduler local --config my.yaml run.steps=9")
    assert calls[1].endswith("launch.json 0")
    for status, ends in (("preempted", 0), ("unsaved", 1), ("failed", 1)):
        assert shell.run(LOCAL, "x", status=status)[0] == ends
    chosen = local_script(config("model").launch, Path("c.yaml"), ["run.name=a b", "--force"])
    assert shell.run(chosen, status="finished")[2][0].endswith("--config c.yaml run.name=a b --force")


@pytest.mark.parametrize("script", [LOCAL, (ROOT / "launch/multinode.sh").read_text()])
def test_a_run_that_has_finished_starts_no_agent(tmp_path: Path, script: str) -> None:
    """`prepare` has said so, and prints no launch file."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho called >>{tmp_path}/calls\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "MEGARL_RSH": "false"}
    done = subprocess.run(
        ["bash", "-c", script, "script", "a,b", "config.yaml"], env=environment, check=False, timeout=20
    )
    assert done.returncode == 0 and (tmp_path / "calls").read_text() == "called\n"


def test_several_nodes_are_not_run_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["launch", "--config", "examples/rl/configs/qwen2_5_32b_grpo_64.yaml", "--scheduler", "local"]
    assert main.main([*arguments, "--dry-run", "--device", "cuda"]) == 2
    assert "needs 8 nodes: use --scheduler slurm" in capsys.readouterr().err


def test_absent_files_are_reported_before_sbatch_and_then_that_it_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["launch", "--config", "examples/rl/configs/qwen3_8b_gsm8k_8.yaml", "--scheduler", "slurm"]
    assert main.main([*arguments, f"run.dir={tmp_path / 'run'}"]) == 2
    reported = capsys.readouterr().err
    absent = [line.partition(":")[0].strip(" -") for line in reported.splitlines()[1:]]
    assert (
        absent == ["model.path", "data.path", "evaluation.sets.0.path"] and "--no-files if only the nodes" in reported
    )
    assert not (tmp_path / "run").exists()
    assert main.main([*arguments, "--no-files", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "sbatch is not on this machine" in capsys.readouterr().err
    assert (tmp_path / "run/launch/train.sbatch").is_file()


def multinode(shell: Shell, status: str, rsh: str) -> tuple[int, str, list[str]]:
    """launch/multinode.sh on hosts a and b; `rsh`: what the remote shell does with `$1` (host) and `$2` (command)."""
    (shell.directory / "rsh").write_text(f"#!/bin/sh\n{rsh}\n")
    (shell.directory / "rsh").chmod(0o755)
    script = (ROOT / "launch/multinode.sh").read_text().replace("failed_wait_s=90", "failed_wait_s=2")
    script = script.replace(
        ': "${PYTHON:=python}"', f'export SCRIPT=$$ MEGARL_RSH={shell.directory / "rsh"}\n: "${{PYTHON:=python}}"'
    )
    return shell.run(script, "a,b", "my.yaml", "run.steps=9", status=status)


def test_several_hosts(shell: Shell) -> None:
    code, _, calls = multinode(shell, "finished", 'echo "rsh $1" >>"$RECORD"; sh -c "$2"')
    assert code == 0
    assert any(call.endswith("prepare --scheduler local --hosts a,b --config my.yaml run.steps=9") for call in calls)
    assert sorted(call for call in calls if call.startswith("rsh")) == ["rsh a", "rsh b"]
    assert sorted(call[-1] for call in calls if "megarl.cluster.nodes.launcher" in call) == ["0", "1"]


def test_a_host_that_cannot_be_reached_is_named_and_one_that_hangs_is_left(shell: Shell) -> None:
    failed = shell.run_dir / "launch/1/failed.json"
    code, _, calls = multinode(shell, "failed", f'[ "$1" = a ] && exit 255; touch {failed}; exec sleep 60')
    assert code == 1
    assert any("fail" in call and " a its agent ended with code 255" in call for call in calls), calls


def test_a_second_signal_ends_the_job_on_all_hosts(shell: Shell) -> None:
    """Both come while the agents run; the first host's connection ends when the job is named as failed."""
    failed = shell.run_dir / "launch/1/failed.json"
    taken = f"while [ ! -e {shell.run_dir}/stop ]; do sleep 0.05; done"
    twice = f"sleep 0.5; kill -TERM $SCRIPT; {taken}; sleep 0.5; kill -TERM $SCRIPT; sleep 0.5"
    signals = f'[ "$1" = b ] || {{ {twice}; touch {failed}; }}'
    code, error, calls = multinode(shell, "failed", signals)
    assert code == 1 and error.count("finishing the step, saving; again to abort") == 1
    assert (shell.run_dir / "stop").read_text() == "SIGTERM\n"
    assert any(" fail " in call and call.endswith("received a second stop signal") for call in calls), calls
