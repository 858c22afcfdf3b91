"""What a test needs and a machine may lack: the test is skipped with the reason, or fails where it must not be."""

import os

import pytest

CLUSTER, FAULTS, NODE, SANDBOX = (f"MEGARL_NEEDS_{what}" for what in ("CLUSTER", "FAULTS", "NODE", "SANDBOX"))


def need(variable: str, lack: str) -> None:
    """Skip the test, or fail it if the environment variable is set. `lack`: why it cannot run here, "" if it can."""
    if left_out(variable, lack):
        pytest.skip(lack)


def left_out(variable: str, lack: str) -> bool:
    """Whether a part of the test cannot run here, which is printed; fail the test if the environment variable is set.

    `lack`: why it cannot run here, "" if it can.
    """
    if lack and os.environ.get(variable):
        pytest.fail(f"{variable} is set, and this cannot be tested here: {lack}")
    if lack:
        print(f"left out: {lack}")
    return bool(lack)
