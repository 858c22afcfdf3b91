"""The fault table's rows of hosts and links, at random moments of a run that learns, against the same run without any.

The task is the quickstart's on three hosts: both ranks on one, an engine on each of the others. MEGARL_FAULT_SEED=N
repeats the order and the moments, as far as another machine allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.chaos import KINDS, SeveralHosts
from benchmarks.lib.hosts import Hosts
from benchmarks.lib.whole_run import make_assets
from tests.support.runs.fault_table import FaultRuns, losses_of_accuracy, problems_of, table_of

# test_hosts.py and test_cut_network.py have the same faults of a run of random tokens; here two runs must learn.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 90
MINUTES = 40.0  # of one run at most
FAULTS = ["lose-node", "cut-link", "sever-link"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[SeveralHosts]:
    hosts = Hosts(SeveralHosts.COUNT, tmp_path)
    try:
        hosts.open()
        yield SeveralHosts(hosts)
    finally:
        hosts.close()


def test_a_lost_host_and_cut_links_cost_no_accuracy_and_train_nothing_twice(
    place: SeveralHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host with an engine is lost and back, a link is cut for 30 s, and one until the job has ended and is resumed.

    All groups are counted again from the files. The end of the job is within the bound of docs/reliability.md.
    """
    make_assets(tmp_path / "assets")
    runs = FaultRuns(tmp_path / "assets", tmp_path / "runs", STEPS, MINUTES, [KINDS[name] for name in FAULTS], place)
    runs.directory.mkdir()
    undisturbed = runs.run("undisturbed")
    assert problems_of(undisturbed, []) == []
    assert undisturbed.summary["eval_after"]["n"] >= 500, "3 points would mean nothing"
    for mode in ("greedy", "sampled"):
        assert undisturbed.accuracy(mode) >= 90.0, "it has hardly learned: nothing could be lost"
    faults = runs.draw(FAULTS)
    outcome = runs.run("disturbed", faults)
    with capsys.disabled():
        print(f"\n{table_of(undisturbed)}\n{table_of(outcome)}")
    assert problems_of(outcome, faults) == []
    assert losses_of_accuracy(undisturbed, outcome) == []
