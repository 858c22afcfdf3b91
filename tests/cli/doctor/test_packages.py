"""Versions against a lock file, and what is said about FlashInfer's kernels."""

from pathlib import Path

import pytest

from megarl.cli.doctor import packages


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", {"a": "1", "b": "2"}.get)
    lock = "# comment\na==1\nb==3\nc[x]==4 ; python_version > '3'\n"
    assert packages.compare_lock(lock) == (["b 2 != 3"], ["c[x]"])


@pytest.mark.parametrize(("found", "level"), [("0.19.2", "ok"), ("0.16.1", "fail"), ("0.20.0", "fail")])
def test_megatron_core_is_of_a_supported_version(found: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", {"megatron-core": found}.get)
    [finding] = [each for each in packages.package_findings(cuda=False) if each.what == "megatron-core"]
    assert finding.level == level and found in finding.detail
    assert bool(finding.fix) == (level == "fail")


@pytest.mark.parametrize(("second", "level"), [("sha256=2", "warn"), ("sha256=1", "ok"), (None, "ok")])
def test_two_owners_of_a_file_are_named(tmp_path: Path, second: str | None, level: str) -> None:
    """As cuda-python 12.6 and cuda-bindings 13: pip installs both, and the files of the last one win."""
    for name, content in (("cuda-bindings", "sha256=1"), ("cuda-python", second)):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        own = (
            f"{info.name}/METADATA,sha256={name},9\nbuild_backend.py,sha256={name},9\n../../../bin/x,sha256={name},9\n"
        )
        (info / "RECORD").write_text(own + (f"cuda/bindings/driver.so,{content},9\n" if content else ""))
    finding = packages.overwritten_finding("run make setup-gpu", [str(tmp_path)])
    assert finding.level == level
    assert ("cuda-bindings and cuda-python (1)" in finding.detail) == (level == "warn")


@pytest.mark.parametrize(
    ("versions", "nvcc", "level", "reported"),
    [
        ({}, True, "ok", "runs without it"),
        ({"flashinfer-cubin": "0.7", "flashinfer-jit-cache": "0.7+cu130"}, True, "ok", "precompiled"),
        ({"flashinfer-cubin": "0.6.13"}, True, "fail", "flashinfer-cubin 0.6.13 next to flashinfer-python 0.7"),
        ({}, True, "warn", "compiles kernels at its start"),
        ({"flashinfer-cubin": "0.7"}, False, "warn", "flashinfer-jit-cache not installed: an engine compiles"),
        ({}, False, "warn", "and no nvcc"),
    ],
)
def test_kernels(
    versions: dict[str, str], nvcc: bool, level: str, reported: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    if nvcc:
        (tmp_path / "bin" / "nvcc").touch()
    library = {} if reported == "runs without it" else {"flashinfer-python": "0.7"}
    monkeypatch.setattr(packages, "installed_version", {**library, **versions}.get)
    monkeypatch.setattr(packages.shutil, "which", lambda name, path=None: "/usr/bin/ninja" if name == "ninja" else None)
    finding = packages.kernel_finding({"CUDA_HOME": str(tmp_path)})
    assert (finding.level, reported in finding.detail) == (level, True), finding
    assert bool(finding.fix) == (level != "ok")
