"""Compiled kernels are never kept where another user can write."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.common.rundir import private_directory
from megarl.common.rundir.private_directory import KERNEL_CACHE_VARIABLE as VARIABLE
from megarl.common.rundir.private_directory import keep_kernels
from tests.support.checkout import environment


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "megarl"


def kept(otherwise: Path) -> Path:
    keep_kernels(lambda: otherwise)
    return Path(os.environ[VARIABLE])


def test_they_are_kept_for_later_runs_where_only_the_user_writes(tmp_path: Path, home: Path) -> None:
    before = os.umask(0o002)
    try:
        assert kept(tmp_path / "other") == home / "torchinductor"
    finally:
        os.umask(before)
    assert (home / "torchinductor").stat().st_mode & 0o777 == 0o700
    os.environ.pop(VARIABLE)
    assert kept(tmp_path / "other") == home / "torchinductor", "the next run uses the same directory"


def test_a_directory_of_the_users_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/chosen")
    assert kept(tmp_path) == Path("/chosen")


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("which", ["megarl", "torchinductor"])
def test_a_directory_that_others_may_write_to_is_not_used(
    tmp_path: Path, home: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory = home / "torchinductor"
    directory.mkdir(parents=True)
    (home if which == "megarl" else directory).chmod(mode)
    assert kept(tmp_path / "private") == tmp_path / "private" / "torchinductor"
    assert "others may write to it" in caplog.text


def test_another_users_directory_is_not_used(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "torchinductor").mkdir(parents=True, mode=0o700)
    uid = os.getuid()
    monkeypatch.setattr(private_directory.os, "getuid", lambda: uid + 1)
    assert kept(tmp_path / "private") == tmp_path / "private" / "torchinductor"


@pytest.mark.slow
def test_torch_compiles_into_it_in_a_process_that_has_activated_its_platform(tmp_path: Path) -> None:
    """Each trainer rank does the same. By torch's own default it would be in the temporary directory."""
    code = (
        "from megarl import platforms; platforms.activate(); from torch._inductor.runtime import cache_dir_utils; "
        "print(cache_dir_utils.cache_dir())"
    )
    known = {name: value for name, value in environment().items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**known, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "cache" / "megarl" / "torchinductor")
