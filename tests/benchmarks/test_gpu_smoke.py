"""benchmarks/gpu_smoke.py on a CPU: every step runs, a missed bound or a hang fails it, and the page gets the table."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from megarl.common.processes import ProcessId, is_alive, kill
from tests.support.checkout import ROOT, environment
from tests.support.waiting import wait_until

SCRIPT = ROOT / "benchmarks" / "gpu_smoke.py"
LIMIT_S = 600


@pytest.fixture(scope="module")
def smoke() -> Iterator[ModuleType]:
    """The script as a module, with its package `smoke` importable beside it."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_smoke_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


def rows(smoke: ModuleType) -> Any:
    return sys.modules["smoke.rows"]


EVERY_STEP = ("streams", "digest", "export", "parity", "speed", "head", "state", "two_ranks")


@pytest.mark.parametrize(
    "steps", [pytest.param(EVERY_STEP, marks=pytest.mark.slow), ("digest", "parity", "head")], ids=["all", "some"]
)
def test_steps_on_a_cpu(tmp_path: Path, steps: tuple[str, ...]) -> None:
    """Values are bounded as on a GPU. Times are too, but loosely: tiny shapes cost what calling costs."""
    page = tmp_path / "gpu.md"
    page.write_text("# Page\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forked_smoke", "--device", "cpu", "--json", str(tmp_path / "rows.json"),
         "--append", str(page), *(["--steps", ",".join(steps)] if steps != EVERY_STEP else [])],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert all(row.keys() == {"name", "ratio", "bound", "ok", "details"} and row["ok"] for row in found)
    assert {row["name"].split(":")[0].removeprefix("gpu_smoke ") for row in found} == set(steps)
    if steps == EVERY_STEP:
        # What a CPU cannot do is said.
        assert "te: left out" in done.stdout
        assert "| streams | buckets without the bytes that the pending work wrote |" in done.stdout
    for precision in ("fp32", "bf16"):
        assert f"| parity | layers of 8B {precision}: difference from transformers' log-probs" in done.stdout
    text = page.read_text()
    assert text.startswith("# Page\n\n### CPU") and f"torch {torch.__version__}" in text and "| parity |" in text


def test_a_step_that_hangs_or_crashes_is_one_failure(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    hangs = smoke.run_step("digest", "cpu", 0.2)
    assert hangs.error == "no end within 0 s" and not hangs.ok and not hangs.rows
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setitem(smoke.STEPS, "digest", smoke.Step("transfers:no_such_function", 60))
    monkeypatch.setattr(smoke, "__file__", "/nowhere/gpu_smoke.py")
    crashes = smoke.run_step("digest", "cpu", 60)
    assert "exit status 2" in crashes.error and not crashes.ok
    text = sys.modules["smoke.rows"].table([hangs, crashes])
    assert text.count("**NO**") == 2 and "FAILED: no end within" in text


def test_a_step_that_hangs_leaves_what_it_printed(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import sys, time\n"
        "print('x' * 5000, 'rank 1 waits', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )  # fmt: skip
    monkeypatch.setattr(smoke, "__file__", str(script))
    assert smoke.run_step("digest", "cpu", 4.0).error == "no end within 4 s"
    printed = capsys.readouterr().err
    assert printed.endswith("rank 1 waits\n") and len(printed) == smoke.SHOWN


# A step that sleeps in the place of another one. `dump` is told the time at which it shows its threads.
SLEEPS = """
import sys, time, types

def sleeps_too_long(where):
    print("sleeps", flush=True)
    time.sleep(120)

sys.path.insert(0, sys.argv[1])
import gpu_smoke
sys.modules["smoke.sleeping"] = module = types.ModuleType("smoke.sleeping")
module.sleeps_too_long = sleeps_too_long
gpu_smoke.STEPS["digest"] = gpu_smoke.Step("sleeping:sleeps_too_long", 60)
gpu_smoke.main(sys.argv[2:])
"""


def test_a_step_that_hangs_shows_where_it_is_before_its_end(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time is that which `run_step` gives; it does not wait for the step's end here."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        commands.append(command)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(smoke.subprocess, "run", run)
    started = time.time()
    assert not smoke.run_step("digest", "cpu", smoke.DUMP_BEFORE_S + 3.0).ok
    monkeypatch.undo()
    [[_, _, *arguments]] = commands
    assert started + 3.0 <= float(arguments[arguments.index("--dump-at") + 1]) <= time.time() + 3.0
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    command = [sys.executable, str(script), str(SCRIPT.parent), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True) as step:
        watchdog = threading.Timer(100.0, step.kill)
        watchdog.start()
        try:
            assert step.stderr is not None
            found = next((line for line in step.stderr if "in sleeps_too_long" in line), "")
        finally:
            watchdog.cancel()
            step.kill()
    assert "sleeps.py" in found


def test_a_missed_bound_is_exit_status_1(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, result = rows(smoke).Row, rows(smoke).StepResult
    missed = result("digest", (row("a", 2.0, 1.0, 3.0, "s"), row("b", 4.0, 1.0, 3.0, "s")), 1.0)
    monkeypatch.setattr(smoke, "run_step", lambda *_: missed)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # main adds to it
    arguments = ["--device", "cpu", "--steps", "digest", "--json", str(tmp_path / "rows.json")]
    assert smoke.main(arguments) == 1
    assert [each["ok"] for each in json.loads((tmp_path / "rows.json").read_text())] == [True, False]
    assert "| 4.000 | 3 | **NO** |" in capsys.readouterr().out
    failed = result("digest", (), 1.0, error="no end within 5 s")
    monkeypatch.setattr(smoke, "run_step", lambda *_: failed)
    assert smoke.main(arguments) == 1
    assert [each["ok"] for each in json.loads((tmp_path / "rows.json").read_text())] == [False]


@pytest.mark.parametrize(
    ("measured", "reference", "ok"),
    [(1.0, 1.0, True), (1.1, 1.0, False), (0.0, 0.0, True), (1.0, 0.0, False), (math.nan, 1.0, False),
     (math.inf, 1.0, False)],
)  # fmt: skip
def test_bounds(smoke: ModuleType, measured: float, reference: float, ok: bool) -> None:
    assert rows(smoke).Row("x", measured, reference, 1.0, "s").ok is ok


def test_a_step_that_measures_nothing_has_failed(smoke: ModuleType, tmp_path: Path) -> None:
    read, write = rows(smoke).read_step, rows(smoke).write_step
    absent = read(tmp_path / "rows.json", "digest", 1.0, "")
    write(tmp_path / "rows.json", [], [])
    empty = read(tmp_path / "rows.json", "digest", 1.0, "")
    assert [each.error for each in (absent, empty)] == ["it measured nothing"] * 2 and not absent.ok and not empty.ok
    write(tmp_path / "rows.json", [], ["there is no CUDA device"])
    assert read(tmp_path / "rows.json", "te", 1.0, "").ok


def test_steps_can_be_chosen_and_fit_half_an_hour(smoke: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.parse(["--steps", "digest,head"]).steps == ["digest", "head"]
    with pytest.raises(SystemExit):
        smoke.parse(["--steps", "digest,nonsense"])
    assert "unknown steps: nonsense" in capsys.readouterr().err
    assert sum(step.limit_s for step in smoke.STEPS.values()) <= 30 * 60


def test_two_ranks_end_before_their_step_does(smoke: ModuleType) -> None:
    training = importlib.import_module("smoke.training")
    assert smoke.STEPS["two_ranks"].limit_s >= training.RANKS_S + 30


def test_ranks_have_one_deadline_together(smoke: ModuleType) -> None:
    training = importlib.import_module("smoke.training")
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"waited 1 s for ranks \[0, 1\] of 2 to end"):
            training.await_ranks(sleeping, 1.0)
        assert time.monotonic() - started < 2.0
        with subprocess.Popen(["false"]) as fails, pytest.raises(RuntimeError, match=r"\[None, 1\]"):
            training.await_ranks([sleeping[0], fails], 30.0)
        with subprocess.Popen(["true"]) as ends:
            training.await_ranks([ends], 30.0)
    finally:
        for each in sleeping:
            each.kill()
            each.wait()


# Starts rank 0 of two, which waits for rank 1, and prints its process id.
STARTS_ONE_RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from smoke import models, training
print(training.start_rank("cpu", "/nowhere", models.free_address(), 0).pid, flush=True)
time.sleep(120)
"""


def listens(pid: int) -> bool:
    return any(each.status == psutil.CONN_LISTEN for each in psutil.Process(pid).net_connections("tcp"))


def test_a_rank_ends_with_the_step_that_started_it() -> None:
    """The step is killed at its deadline, so it cannot end its ranks itself."""
    command = [sys.executable, "-c", STARTS_ONE_RANK, str(SCRIPT.parent)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as step:
        watchdog = threading.Timer(100.0, step.kill)
        watchdog.start()
        assert step.stdout is not None
        rank = ProcessId.of(int(step.stdout.readline()))
        # It listens as soon as it waits for rank 1, in a call that would last for half an hour.
        wait_until(lambda: listens(rank.pid), 100.0, "rank 0 to listen")
        step.kill()
        watchdog.cancel()
    try:
        wait_until(lambda: not is_alive(rank), 10.0, "rank 0 to end with its parent")
    finally:
        kill([rank], signal.SIGKILL)


def test_tf32_is_off_where_fp32_is_compared(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setenv("KEPT", "1")
    values = {name: smoke.environment_of(name).get("NVIDIA_TF32_OVERRIDE") for name in smoke.STEPS}
    assert {name for name, value in values.items() if value is not None} == {"parity", "two_ranks"}
    assert values["parity"] == values["two_ranks"] == "0"
    assert all(smoke.environment_of(name)["KEPT"] == "1" for name in smoke.STEPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_cuda_device(smoke: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_steps_name_functions(smoke: ModuleType) -> None:
    for step in smoke.STEPS.values():
        module, _, function = step.function.partition(":")
        assert f"def {function}(" in (SCRIPT.parent / "smoke" / f"{module}.py").read_text()
