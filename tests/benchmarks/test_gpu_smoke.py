"""benchmarks/gpu_smoke.py on a CPU: every step runs, a missed bound or a hang fails it, and the page gets the table."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.checkout import ROOT, environment

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


def test_every_step_on_a_cpu(tmp_path: Path) -> None:
    """Values are bounded as on a GPU. Times are too, but loosely: tiny shapes cost what calling costs."""
    page = tmp_path / "gpu.md"
    page.write_text("# Page\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forked_smoke", "--device", "cpu", "--json", str(tmp_path / "rows.json"),
         "--append", str(page)],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert all(row.keys() == {"name", "ratio", "bound", "ok", "details"} and row["ok"] for row in found)
    steps = {row["name"].split(":")[0].removeprefix("gpu_smoke ") for row in found}
    assert steps == {"streams", "digest", "export", "parity", "speed", "head", "state", "two_ranks"}
    # What a CPU cannot do is said.
    assert "te: left out" in done.stdout
    assert "| streams | buckets without the bytes that the pending work wrote |" in done.stdout
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_cuda_device(smoke: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_steps_name_functions(smoke: ModuleType) -> None:
    for step in smoke.STEPS.values():
        module, _, function = step.function.partition(":")
        assert f"def {function}(" in (SCRIPT.parent / "smoke" / f"{module}.py").read_text()
