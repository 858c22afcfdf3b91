"""The supported versions of Megatron-Core, and a check that a session tests the one that it was started for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megarl.common import megatron_versions
from megarl.common.errors import InstallationError
from tests.support.checkout import ROOT
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
