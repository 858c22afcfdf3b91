"""The versions of Megatron-Core that megarl supports."""

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megarl.common.errors import InstallationError

SUPPORTED = ">=0.19.2,<0.20"  # as in pyproject.toml


def is_supported(version: str) -> bool:
    """Return whether megarl supports this version. A release candidate counts as its release."""
    return Version(Version(version).base_version) in SpecifierSet(SUPPORTED)


def check_imported() -> None:
    """Raise InstallationError if the imported Megatron-Core is not supported.

    Its defects are unknown: a version that needs a patch, and does not get it, may compute wrong gradients silently.
    """
    import megatron.core

    if not is_supported(megatron.core.__version__):
        raise InstallationError(
            f"megatron-core {megatron.core.__version__} is installed, but megarl supports {SUPPORTED}: the patches for "
            "its defects belong to a version. Install the locked version: `make setup`, on CUDA `make setup-gpu`"
        )
