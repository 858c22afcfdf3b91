"""A fault that cannot happen on a machine: it is left out with the reason, or fails where it must not be left out."""

from __future__ import annotations

import os

import pytest

FAULTS = "MEGARL_NEEDS_FAULTS"


def impossible(reason: str) -> bool:
    """Tell whether a fault cannot happen here, and print the reason; fail the test if MEGARL_NEEDS_FAULTS is set.

    `reason`: "" if the fault can happen.
    """
    if reason and os.environ.get(FAULTS):
        pytest.fail(f"{FAULTS} is set, and a fault of this test cannot happen here: {reason}")
    if reason:
        print(f"left out: {reason}")
    return bool(reason)
