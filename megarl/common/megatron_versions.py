"""The versions of Megatron-Core that megarl supports, and which of them this process has imported."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megarl.common.errors import InstallationError

SUPPORTED = ">=0.16.1,<0.20"  # as in pyproject.toml


def imported_is(versions: str) -> bool:
    """Tell whether the version of the imported Megatron-Core is one of `versions`, such as ">=0.17,<0.19".

    Imports Megatron-Core.
    """
    import megatron.core

    return contains(versions, megatron.core.__version__)


def contains(versions: str, version: str) -> bool:
    """Tell whether `version` is one of `versions`. A release candidate counts as its release."""
    return Version(Version(version).base_version) in SpecifierSet(versions)


def check_imported() -> None:
    """Raise InstallationError if the imported Megatron-Core is not supported.

    Its defects are unknown: a version that needs a patch, and does not get it, may compute wrong gradients silently.
    """
    import megatron.core

    if not contains(SUPPORTED, megatron.core.__version__):
        raise InstallationError(
            f"megatron-core {megatron.core.__version__} is installed, but megarl supports {SUPPORTED}: the patches for "
            "its defects depend on the version. Install the locked version: `make setup`, on CUDA `make setup-gpu`"
        )
