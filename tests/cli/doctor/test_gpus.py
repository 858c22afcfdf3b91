"""Driver, NCCL and peer access: what is said about each state that a GPU machine can be in."""

from itertools import product

import pytest

from megarl.cli.doctor.gpus import OLDEST_DRIVER, Driver, driver_finding, find_driver, nccl_finding, peer_finding
from megarl.config.derived.hardware import local_gpus


@pytest.mark.parametrize(("cuda", "level"), [((12, 8), "fail"), ((13, 0), "ok"), ((13, 2), "ok"), ((14, 0), "ok")])
def test_driver_against_torch(cuda: tuple[int, int], level: str) -> None:
    finding = driver_finding(Driver("1.2.3", cuda), "13.0")
    assert finding.level == level and "1.2.3" in finding.detail
    if level == "fail":
        assert OLDEST_DRIVER[13] in finding.fix


def test_driver_of_an_older_minor_version_is_a_warning() -> None:
    assert driver_finding(Driver("1.2.3", (13, 0)), "13.2").level == "warn"


def test_driver_of_this_machine() -> None:
    assert (find_driver() is None) == (local_gpus() == ())


@pytest.mark.parametrize(
    ("loaded", "packaged", "level"),
    [("2.29.7", "2.29.7", "ok"), ("2.29.7", "2.29.7.1", "ok"), ("2.21.5", "2.29.7", "warn"), ("2.29.7", None, "ok"),
     (None, "2.29.7", "fail")],
)  # fmt: skip
def test_nccl_against_torch(loaded: str | None, packaged: str | None, level: str) -> None:
    assert nccl_finding(loaded, packaged).level == level


def test_peer_access() -> None:
    assert peer_finding([[True]]).level == "ok"
    assert peer_finding([[True] * 3] * 3).level == "ok"
    for i, j in product(range(3), repeat=2):
        if i != j:
            can = [[(a, b) != (i, j) for b in range(3)] for a in range(3)]
            finding = peer_finding(can)
            assert finding.level == "warn" and f"GPUs {i}-{j}" in finding.detail and finding.fix
