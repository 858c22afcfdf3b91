"""Imports in processes of their own: an error, a crash and a hang are one finding each, with the fix."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megarl.cli.doctor.imports import TRANSFORMER_ENGINE, ImportOutcome, Part, import_findings, run_import

# What Transformer Engine 2.11 raises without its torch extension, in the function and the words of its
# common/__init__.py; Megatron-Core catches ImportError only.
HALF_INSTALLED = "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')\n"


def part(code: str) -> Part:
    return Part("import x", code, "json", "do this")


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import sys; sys.exit(3)", "no output"),
    ],
)
def test_a_failed_import_is_one_finding(code: str, reported: str) -> None:
    (finding,) = import_findings(False, [part(code)])
    assert finding.level == "fail" and reported in finding.detail and finding.fix == "do this"


def test_a_hanging_import_is_bounded() -> None:
    (finding,) = import_findings(False, [part("import time; time.sleep(60)")], partial(run_import, timeout_s=1.0))
    assert finding.level == "fail" and "did not finish within 1 s" in finding.detail


def test_half_an_installation_of_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(HALF_INSTALLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (finding,) = import_findings(True, [TRANSFORMER_ENGINE])
    assert finding.level == "fail" and "FileNotFoundError" in finding.detail and "make gpu-te" in finding.fix


def test_a_trainer_that_fails_of_transformer_engine_names_the_same_fix() -> None:
    (finding,) = import_findings(True, [part(HALF_INSTALLED)])
    assert finding.level == "fail" and finding.fix == TRANSFORMER_ENGINE.fix


def test_transformer_engine_that_is_not_installed_is_a_warning_on_cuda_only() -> None:
    (finding,) = import_findings(True, [TRANSFORMER_ENGINE])
    assert finding.level == "warn" and "make setup-gpu" in finding.fix
    assert not list(import_findings(False, [TRANSFORMER_ENGINE]))


@pytest.mark.parametrize(
    ("loaded", "warned"), [(["/a/libcudnn.so.9"], False), (["/a/libcudnn.so.9", "/b/libcudnn.so.9"], True)]
)
def test_two_cudnns_are_reported(
    loaded: list[str], warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    said = ImportOutcome(0, "".join(f"cudnn: {path}\n" for path in loaded), "")
    run: Callable[[Part], ImportOutcome] = lambda _: said  # noqa: E731
    findings = list(import_findings(True, [TRANSFORMER_ENGINE], run))
    assert [finding.level for finding in findings] == ["ok", *(["warn"] if warned else [])]
    assert not warned or "CUDNN_PATH" in findings[1].fix
