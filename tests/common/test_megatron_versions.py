"""The supported versions of Megatron-Core, and a check that a session tests the one that it was started for."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megarl.common import megatron_versions
from megarl.common.errors import InstallationError
from tests.support.checkout import ROOT, environment
from tests.support.repository.megatron_version import VARIABLE, check_megatron_version
from tests.support.worlds.world import World


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [asked] = [each for each in map(Requirement, project["dependencies"]) if each.name == "megatron-core"]
    assert asked.specifier == Requirement(f"megatron-core{megatron_versions.SUPPORTED}").specifier


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.16.0", False), ("0.16.1", True), ("0.19.2", True), ("0.19.0rc1+abc", True), ("0.20.0", False),
     ("0.20.0rc0", False)],
)  # fmt: skip
def test_other_versions_are_refused(version: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", version)
    assert megatron_versions.imported_is(megatron_versions.SUPPORTED) == supported
    if supported:
        megatron_versions.check_imported()
        return
    with pytest.raises(InstallationError, match=f"megatron-core {version} is installed, but megarl supports"):
        megatron_versions.check_imported()


@pytest.mark.world
def test_ranks_import_the_version_that_is_installed(world: Callable[[int], World]) -> None:
    installed = version("megatron-core")  # of the first directory on the path that has one
    [imported] = world(1).run("tests.support.ranks.models.megatron_defects:imported_version")
    assert Version(imported).public == installed


@pytest.mark.parametrize("found", ["0.19.2", "0.19.2+7a3bf5c"])
def test_the_commit_of_a_repository_around_it_is_no_other_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    from megarl import platforms

    monkeypatch.setattr(platforms, "activate", lambda: None)  # it would take the patches of the version that is told
    monkeypatch.setattr(megatron.core, "__version__", found)
    monkeypatch.setenv(VARIABLE, "0.19.2")
    check_megatron_version()
    monkeypatch.setenv(VARIABLE, "0.19.1")
    with pytest.raises(RuntimeError, match="is imported from"):
        check_megatron_version()


def test_a_session_with_another_version_than_expected_does_not_start() -> None:
    program = "from tests.support.repository.megatron_version import check_megatron_version as check; check()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(**{VARIABLE: "0.0.1"}), cwd=ROOT, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"{VARIABLE}=0.0.1, but megatron-core {version('megatron-core')}" in done.stderr
