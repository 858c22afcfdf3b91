"""benchmarks/gpu_smoke.py without a GPU: a missed bound or a hang fails it, and its steps find what is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import setuptools
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.weights.send.sync_attempt import SyncAttempt
from tests.benchmarks import load_script
from tests.support.checkout import ROOT, environment
from tests.support.streams.simulated_nccl import SimulatedNCCL, SimulatedWork
from tests.support.streams.smoke_streams import SimulatedStreams


@pytest.fixture
def smoke() -> ModuleType:
    return load_script("gpu_smoke")


ROWS = load_script("smoke.rows")
TINY = ROWS.Where(torch.device("cpu"), True)


def test_a_step_that_hangs_or_crashes_is_one_failure(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = smoke.run_step("digest", "cpu", 0.2)
    assert hangs.error == "no end within 0 s" and not hangs.ok and not hangs.rows
    monkeypatch.setattr(smoke, "__file__", "/nowhere/gpu_smoke.py")
    crashes = smoke.run_step("digest", "cpu", 60)
    assert "exit status 2" in crashes.error and not crashes.ok
    text = ROWS.table([hangs, crashes])
    assert text.count("**NO**") == 2 and "FAILED: no end within" in text


def test_a_missed_bound_is_exit_status_1(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, result = ROWS.row, ROWS.StepResult
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


def test_a_step_that_measures_nothing_has_failed(tmp_path: Path) -> None:
    read, write = ROWS.read_step, ROWS.write_step
    absent = read(tmp_path / "rows.json", "digest", 1.0, "")
    write(tmp_path / "rows.json", [], [])
    empty = read(tmp_path / "rows.json", "digest", 1.0, "")
    assert [each.error for each in (absent, empty)] == ["it measured nothing"] * 2 and not absent.ok and not empty.ok
    write(tmp_path / "rows.json", [], ["there is no CUDA device"])
    assert read(tmp_path / "rows.json", "streams", 1.0, "").ok


# docs/gpu.md: what has to be installed, besides what torch and transformers ask for.
CARRIED = ["megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "blake3"]
HIDE = """
import importlib.machinery, os
find, hidden = importlib.machinery.PathFinder.find_spec, set(os.environ["HIDDEN"].split(","))
importlib.machinery.PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in hidden else find(name, path, target))
"""


def required(name: str, found: set[str]) -> set[str]:
    """Add a distribution and what it asks for, without extras, to `found`, and return it."""
    if name not in found:
        found.add(name)
        with suppress(PackageNotFoundError):
            for each in map(Requirement, requires(name) or []):
                if each.marker is None or each.marker.evaluate({"extra": ""}):
                    required(canonicalize_name(each.name), found)
    return found


@pytest.mark.parametrize(
    "steps", ["digest,export", pytest.param("parity,speed,head,state,two_ranks,shared", marks=pytest.mark.slow)]
)
def test_it_needs_torch_transformers_and_seven_wheels(steps: str, tmp_path: Path) -> None:
    """All other distributions of this environment are hidden from the script and its children."""
    there = {"torch", "transformers", "psutil", "pyyaml", *CARRIED}
    kept = set(CARRIED).union(*(required(name, set()) for name in there - {"megatron-core"}))
    kept.discard("rich")  # only the command line of transformers has it
    kept.add("triton")  # torch for CUDA asks for it
    names = {top: {canonicalize_name(each) for each in owners} for top, owners in packages_distributions().items()}
    vendored = {each.name for each in (Path(setuptools.__file__).parent / "_vendor").iterdir()}
    shown = {"megarl", "_distutils_hack", *vendored}
    hidden = [top for top, owners in names.items() if not owners & kept and top not in shown]
    assert {"vllm", "ray", "einops", "pyarrow", "zmq", "rich", "math_verify"} <= set(hidden)
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    own = environment(HIDDEN=",".join(hidden))
    own["PYTHONPATH"] = f"{tmp_path}:{own['PYTHONPATH']}"
    command = [sys.executable, str(ROOT / "benchmarks/gpu_smoke.py"), "--device", "cpu", "--steps", steps]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


# --- CUDA's streams and NCCL: simulated devices, some of which order work as these do

PREMISE, OWN_STREAM, TIMEOUT, ABORT, SOON, BYTES, DEADLINE = range(7)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("smoke.streams")
    monkeypatch.setattr(module, "OCCUPIED_S", 0.3)
    return module


class Unordered(SimulatedStreams):
    """Its threads issue on streams of their own, so nothing waits for the pending work."""

    def stream(self, *, own: bool) -> AbstractContextManager[None]:
        return super().stream(own=True)


def failed_rows(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Call a function that measures; return the numbers of its rows whose bounds do not hold."""
    device: SimulatedStreams = next(each for each in arguments if isinstance(each, SimulatedStreams))
    with closing(device):
        rows = function(*arguments)
    return [number for number, row in enumerate(rows) if not row.ok]


def all_failed_rows(streams: ModuleType, device: SimulatedStreams) -> list[int]:
    def run(device: SimulatedStreams) -> Any:
        rows, left_out = streams.run(TINY, device)
        assert not left_out and len(rows) == 7
        return rows

    return failed_rows(run, device)


def test_a_device_that_orders_by_streams(streams: ModuleType) -> None:
    assert all_failed_rows(streams, SimulatedStreams()) == []


def test_an_abort_may_wait_for_the_pending_work(streams: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's frees device memory, and a timeout in blocking mode aborts."""
    wait = SimulatedWork.wait

    def aborting_wait(work: SimulatedWork, timeout: timedelta | None = None) -> bool:
        try:
            return wait(work, timeout)
        except RuntimeError:
            work._device.synchronize()
            raise

    monkeypatch.setattr(SimulatedWork, "wait", aborting_wait)
    monkeypatch.setattr(SimulatedNCCL, "abort", lambda group: group._device.synchronize())
    assert all_failed_rows(streams, SimulatedStreams()) == []


def test_a_device_without_the_premise_fails(streams: ModuleType) -> None:
    """No wait of such a device lasts until the pending work ends, so none runs into a timeout or a deadline."""
    assert all_failed_rows(streams, Unordered()) == [PREMISE, TIMEOUT, DEADLINE]


def test_a_publish_on_a_stream_of_its_own_carries_old_weights(streams: ModuleType) -> None:
    device = SimulatedStreams()

    class Alongside(SyncAttempt):
        def run(self) -> None:
            with device.stream(own=True):
                super().run()

    with patch.object(streams.publish, "SyncAttempt", Alongside):
        assert failed_rows(streams.publish.rows, TINY, device, streams.OCCUPIED_S) == [BYTES - SOON]
