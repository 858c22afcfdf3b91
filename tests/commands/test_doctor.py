"""`megarl doctor`: what it finds here, and when it says that a run cannot start."""

from __future__ import annotations

import json

import pytest

from megarl.commands import cli, doctor


def test_doctor_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_start"] and report["device"] in ("cpu", "cuda")
    assert {"device path", "ray", "megarl plugin for vLLM"} <= {finding["what"] for finding in report["findings"]}
    # The lock files of this checkout are found, and compared with what is installed.
    assert not any("beside the package" in finding["detail"] for finding in report["findings"])


def test_doctor_fails_when_a_run_could_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "ray" else real(name))
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "fail  ray" in text and "cannot start" in text


def test_doctor_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"a": "1", "b": "2"}.get)
    lock = "# comment\na==1\nb==3\nc[x]==4 ; python_version > '3'\n"
    assert doctor.compare_lock(lock) == (["b 2 != 3"], ["c[x]"])
