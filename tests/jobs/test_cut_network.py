"""launch/multinode.sh over two hosts between which the network is cut: for a time, and for ever.

The run waits idly for most of the test, while that of another file can use the cores.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from benchmarks.soak_hosts import Hosts
from tests.support.jobs import TWO_HOSTS, check_steps, start_job, wait_for, write_job
from tests.support.run import step_records

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_network_that_is_cut_for_30_s_costs_time_and_for_ever_is_named(two_hosts: Hosts, tmp_path: Path) -> None:
    """The cable of the rollout host is pulled twice while the run trains; the trainer restarts for neither."""
    bound_s = 60
    config = write_job(
        tmp_path, steps=100_000, timeouts={"rpc_s": bound_s, "shutdown_s": 20},
        launch={"max_restarts": 0}, **TWO_HOSTS,
    )  # fmt: skip
    run_dir = tmp_path / "run"
    process, log = start_job(two_hosts, config)
    try:
        wait_for(lambda: len(step_records(run_dir)) > 2 or process.poll() is not None, 400, "some steps", log)
        two_hosts.cut(1)
        time.sleep(30)
        two_hosts.mend(1)
        before = len(step_records(run_dir))
        wait_for(
            lambda: len(step_records(run_dir)) > before + 2 or process.poll() is not None, bound_s, "further steps", log
        )
        assert process.poll() is None, log.read_text()[-4000:]
        assert log.read_text().count("engines are up") == 1, "the ranks were restarted"
        check_steps(run_dir)
        two_hosts.cut(1)
        # Ray 2.60.0 notices a connection that is silently gone by gRPC's time-outs, of up to 300 s. From then on it may
        # be cut for `rpc_s`, however long Ray needs to report each further attempt.
        assert process.wait(timeout=300 + bound_s + 60) == 1, log.read_text()[-4000:]
    finally:
        process.kill()
    said = log.read_text()
    if "trainer rank 0 waited" not in said:  # the bound of a call that was under way, if Ray has noticed nothing before
        named = re.search(r"trainer rank 0 could not reach the rollout controller for (\d+) s", said)
        assert named is not None and int(named[1]) <= bound_s + 10, said[-4000:]
