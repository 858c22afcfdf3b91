"""The secret of a run: one for all processes, whoever makes it, and known to no other user."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.common.trust.run_secret import SECRET_FILE, derived_key, run_secret


def test_processes_that_start_together_have_one_secret(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def read(_: int) -> bytes:
        barrier.wait(60)
        return run_secret(tmp_path / "run")

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(read, range(8)))
    assert len(found) == 1 and len(found.pop()) == 32
    assert os.listdir(tmp_path / "run") == [SECRET_FILE], "no temporary file is left"
    assert (tmp_path / "run" / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert run_secret(tmp_path / "run") != run_secret(tmp_path / "other")


def test_a_secret_that_others_may_know_is_refused(tmp_path: Path) -> None:
    run_secret(tmp_path)
    path = tmp_path / SECRET_FILE
    for mode in (0o640, 0o604, 0o602):
        path.chmod(mode)
        with pytest.raises(PermissionError, match=f"mode {mode:04o}.*remove the file"):
            run_secret(tmp_path)
    path.chmod(0o600)
    path.write_text("ab")
    with pytest.raises(ValueError, match="damaged"):
        run_secret(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        run_secret(tmp_path)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match=f"the file system of {tmp_path} has no hard links .*set run.dir to") as caught:
        run_secret(tmp_path)
    assert caught.value.errno == number and os.listdir(tmp_path) == [], "no temporary file is left"


def test_keys_of_different_purposes_differ(tmp_path: Path) -> None:
    secret = run_secret(tmp_path)
    assert len({secret, derived_key(secret, "a"), derived_key(secret, "b")}) == 3
    assert derived_key(secret, "a") == derived_key(run_secret(tmp_path), "a")
