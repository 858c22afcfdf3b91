"""The Megatron-Core that a session of tests has to import: `make nightly-mcore` lays one before the locked one."""

from __future__ import annotations

import os

from packaging.version import Version

VARIABLE = "MEGARL_EXPECT_MCORE"


def check_megatron_version() -> None:
    """Import Megatron-Core if `VARIABLE` is set. Raises RuntimeError if it is of another version than that names.

    Otherwise a path that some process does not inherit would test the locked version again, and pass.
    """
    expected = os.environ.get(VARIABLE)
    if not expected:
        return
    from megarl import platforms

    platforms.activate()
    import megatron.core

    # Newer versions add the commit of the git repository that they lie in, here megarl's own.
    if Version(megatron.core.__version__).public != expected:
        raise RuntimeError(
            f"{VARIABLE}={expected}, but megatron-core {megatron.core.__version__} is imported from "
            f"{megatron.core.__file__}: is its directory the first with a `megatron` on PYTHONPATH?"
        )
