"""The supported versions of Megatron-Core."""

import tomllib

import pytest
from packaging.requirements import Requirement

from megarl.common import megatron_versions
from megarl.common.errors import InstallationError
from tests.support.checkout import ROOT


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [asked] = [each for each in map(Requirement, project["dependencies"]) if each.name == "megatron-core"]
    assert asked.specifier == Requirement(f"megatron-core{megatron_versions.SUPPORTED}").specifier


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.16.1", False), ("0.19.1", False), ("0.19.2", True), ("0.19.2+7a3bf5c", True), ("0.19.3rc1+abc", True),
     ("0.20.0", False), ("0.20.0rc0", False)],
)  # fmt: skip
def test_other_versions_are_refused(version: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", version)
    assert megatron_versions.is_supported(version) == supported
    if supported:
        megatron_versions.check_imported()
        return
    with pytest.raises(InstallationError, match=f"megatron-core {version} is installed, but megarl supports"):
        megatron_versions.check_imported()
