"""An allocation that does not fit is refused before anything starts."""

from typing import Any

import pytest

from megarl.cluster.nodes.prepare import Allocation, check_allocation, parse_duration, slurm_allocation
from megarl.cluster.nodes.topology import make_topology
from megarl.common.errors import ConfigError
from tests.support.trainer.configs import config

SPLIT: dict[str, Any] = {
    "trainer": {"gpus": 16, "gpus_per_node": 8},
    "rollout": {"replicas": 8, "gpus_per_node": 8},
    "launch": {"time_limit": "02:00:00", "stop_before_s": 600},
    "timeouts": {"save_s": 300},
}
HOSTS = ("n1", "n2", "n3")


def problems(
    hosts: tuple[str, ...] = HOSTS, gpus: int | None = 8, seconds: int | None = 7200, signal: int | None = 600
) -> list[str]:
    chosen = config("model", **SPLIT)
    try:
        allocation = Allocation(hosts, gpus, seconds, signal)
        check_allocation(chosen.launch, chosen.timeouts, make_topology(chosen), allocation, cuda=True)
    except ConfigError as error:
        return error.problems
    return []


def test_what_fits() -> None:
    assert problems() == []
    assert problems(gpus=None, seconds=None) == []
    assert problems(seconds=7190) == []  # the job has just started


@pytest.mark.parametrize(
    ("allocation", "reported"),
    [
        ({"hosts": ("n1",)}, "nodes: the job has 1 (n1), the config needs 3 (2 trainer, 1 rollout); ask for --nodes=3"),
        ({"hosts": (*HOSTS, "n4")}, "the job has 4"),
        ({"gpus": 4}, "GPUs per node: the job has 4, the config uses devices up to 7; ask for --gpus-per-node=8"),
        ({"seconds": 500}, "asked to stop 600 s before the limit"),
        ({"signal": 599}, "submit with MEGARL_SIGNAL_S=600 and --signal=B:USR1@600"),
        ({"seconds": 3600}, "launch.time_limit is 02:00:00"),
    ],
)
def test_what_does_not(allocation: dict[str, Any], reported: str) -> None:
    assert any(reported in problem for problem in problems(**allocation)), problems(**allocation)


def test_everything_wrong_is_reported_at_once() -> None:
    assert len(problems(hosts=("n1",), gpus=2, seconds=500)) == 4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784), ("02:03:04", 7384), ("03:04", 184), ("0:00", 0), ("UNLIMITED", None), ("INVALID", None)],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


def test_outside_a_job() -> None:
    with pytest.raises(ConfigError, match="not inside a SLURM job"):
        slurm_allocation({})
