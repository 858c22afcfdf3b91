"""Another user of the host and the sockets of a run, which Ray makes in directories that all may change."""

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.common.rundir.private_directory import make_private_directory, remove_private_directory
from tests.support.repository.needs import FAULTS, need

NOBODY = 65534


def rename(path: Path) -> None:
    path.rename(path.with_name("away"))


def replace(path: Path) -> None:
    path.unlink()
    path.symlink_to("/tmp/elsewhere")


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))


def succeeds_as_another_user(attempt: Callable[[Path], None], path: Path) -> bool:
    """Make an attempt in a process of a user without rights."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt(path)
            os._exit(0)
        except PermissionError:
            os._exit(13)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 13)
    return code == 0


@pytest.fixture(autouse=True)
def _root() -> None:
    need(FAULTS, "" if os.geteuid() == 0 else "only root can become another user")


@pytest.fixture(params=[False, True], ids=["as Ray makes it", "below a run's private directory"])
def listening(request: pytest.FixtureRequest) -> Iterator[tuple[Path, bool]]:
    """A socket in directories of the modes that Ray 2.60.0 gives them, and whether they are guarded."""
    base = make_private_directory() if request.param else Path(tempfile.mkdtemp(prefix="unguarded-", dir="/tmp"))
    sockets = base / "ray" / "session" / "sockets"
    sockets.mkdir(parents=True, exist_ok=True)
    for directory in (sockets, sockets.parent, sockets.parent.parent):
        directory.chmod(0o777)
    if not request.param:
        base.chmod(0o777)
    path = sockets / "raylet"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        yield path, request.param
    remove_private_directory(base) if request.param else shutil.rmtree(base)


@pytest.mark.parametrize("attempt", [rename, replace, connect])
def test_another_user_cannot_take_the_place_of_a_socket(
    listening: tuple[Path, bool], attempt: Callable[[Path], None]
) -> None:
    path, guarded = listening
    assert succeeds_as_another_user(attempt, path) != guarded
    untouched = path.exists() and stat.S_ISSOCK(path.lstat().st_mode)
    assert untouched == (guarded or attempt is connect)
