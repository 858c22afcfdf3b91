"""Private directories: modes, lengths of sockets' paths, and what is swept when."""

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import msgspec
import pytest

from megarl.common.process.processes import ProcessId, has_ended, this_place
from megarl.common.rundir import private_directory
from megarl.common.rundir.private_directory import (
    VARIABLE,
    Owner,
    make_private_directory,
    remove_private_directory,
    sweep_dead_directories,
)

DEAD = ProcessId(os.getpid(), 1)  # this pid, but of an earlier process


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of the test's own."""
    monkeypatch.setattr(private_directory, "_base", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def private() -> Iterator[Path]:
    directory = make_private_directory()
    yield directory
    remove_private_directory(directory)


def record(directory: Path, process: ProcessId) -> None:
    (directory / "owner.json").write_bytes(msgspec.json.encode(Owner(process, this_place())))


def test_only_the_user_can_enter(private: Path) -> None:
    assert [path.stat().st_mode & 0o777 for path in (private, private / "ray", private / "tmp")] == [0o700] * 3


def test_temporary_files_of_a_process_and_its_children(private: Path, tmp_path: Path) -> None:
    code = "import tempfile, subprocess, sys; from pathlib import Path; tempfile.gettempdir(); "
    code += "from megarl.common.rundir.private_directory import use_private_directory as use; use(Path(sys.argv[1])); "
    code += "print(tempfile.gettempdir(), flush=True); "
    code += "subprocess.run([sys.executable, '-c', 'import tempfile; print(tempfile.gettempdir())'])"
    code += "; import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    # torch sets the variable, once it has compiled something in this process.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(private)], capture_output=True, text=True, check=True,
        env={**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    kept = tmp_path / "cache" / "megarl" / "torchinductor"
    assert done.stdout.split() == [*[str(private / "tmp")] * 2, str(kept)] and kept.stat().st_mode & 0o777 == 0o700


def test_the_next_start_sweeps_what_a_dead_run_left(private: Path, base: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    record(private, ProcessId.of(process.pid))
    assert sweep_dead_directories() == [] and private.is_dir()
    process.kill()
    process.wait(timeout=60)
    (private / "ray/session").mkdir()
    (private / "ray/session/raylet").write_text("")
    assert sweep_dead_directories() == [private] and not private.exists()
    assert list(base.iterdir()) == []


def test_what_has_ended() -> None:
    host, boot, namespace = this_place().split("/")
    assert has_ended(ProcessId.own(), this_place()) is False and has_ended(DEAD, this_place())
    assert has_ended(DEAD, f"another/{boot}/{namespace}") is None
    assert has_ended(DEAD, f"{host}/{boot}/1") is None, "another container: its pids mean nothing here"
    assert has_ended(ProcessId.own(), f"{host}/an earlier one/{namespace}")


@pytest.mark.parametrize("case", ["open to others", "a link", "no owner", "nonsense", "another name"])
def test_what_is_left_alone(case: str, private: Path, base: Path) -> None:
    record(private, DEAD)
    kept = private
    if case == "open to others":
        private.chmod(0o755)
    elif case == "a link":
        kept = private.rename(base / "elsewhere")
        private.symlink_to(kept)
    elif case == "no owner":
        (private / "owner.json").unlink()
    elif case == "nonsense":
        (private / "owner.json").write_text("[]")
    else:
        kept = private.rename(base / "megarl-notes")
    assert sweep_dead_directories() == [] and kept.is_dir()


def test_semaphores_and_shared_memory_go_too(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a killed process; a bystander's stay."""
    before = set(os.listdir("/dev/shm"))
    monkeypatch.setenv(VARIABLE, str(private))
    (private / "tmp/vllm_dist_0123").touch()
    Path("/dev/shm/vllm_dist_0123-tp:0").touch()
    code = """
import multiprocessing, os, signal
from multiprocessing import shared_memory
from megarl.common.rundir.private_directory import name_shared_memory

if __name__ == "__main__":
    name_shared_memory()
    from multiprocessing import resource_tracker
    lock = multiprocessing.get_context("spawn").Lock()
    memory = shared_memory.SharedMemory(create=True, size=8)
    print(lock._semlock.name, memory.name, flush=True)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    tag = private.name.removeprefix("megarl-")
    left = set(os.listdir("/dev/shm")) - before
    assert sum(tag in name for name in left) == 2, (left, done.stdout, done.stderr)
    bystander = shared_memory.SharedMemory(create=True, size=8)
    try:
        remove_private_directory(private)
        now = os.listdir("/dev/shm")
        assert bystander.name in now and not [name for name in now if tag in name or "vllm_dist_0123" in name]
    finally:
        bystander.close()
        bystander.unlink()
