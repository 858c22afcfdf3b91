"""The fault table: one fault after another at random moments of a run, against the same run without any.

The task is the quickstart's, asynchronous, with partial rollouts and two engines. MEGARL_FAULT_SEED=N repeats the order
and the moments of a run, as far as another machine allows.
"""

from pathlib import Path

import pytest

from benchmarks.lib.chaos import KINDS, SoakOutcome
from benchmarks.lib.file_faults import why_no_handles
from tests.support.models.assets import Assets
from tests.support.repository.needs import FAULTS, left_out
from tests.support.runs.fault_table import FaultRuns, losses_of_accuracy, problems_of, table_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 140  # enough for the last fault to be over, even where steps are fast
MINUTES = 20.0  # of one run at most
LOST_ENGINES = [
    "kill-engine", "kill-engine-idle", "kill-engine-in-sync", "hang-engine", "hang-engine-in-sync", "crawl-engine",
]  # fmt: skip
LOST_PARTS = [
    "kill-controller", "kill-queue", "kill-reward", "hang-reward", "fork-reward", "flood-reward", "kill-agent-worker",
    "hang-agent-worker", "flood-agent-worker",
]  # fmt: skip
LOST_RANKS = ["kill-rank", "damage-job"]


@pytest.fixture(scope="module")
def runs(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    kinds = [KINDS[name] for name in LOST_ENGINES + LOST_PARTS + LOST_RANKS]
    return FaultRuns(assets.directory, tmp_path_factory.mktemp("faults"), STEPS, MINUTES, kinds)


@pytest.fixture(scope="module")
def undisturbed(runs: FaultRuns) -> SoakOutcome:
    return undisturbed_run(runs)


def undisturbed_run(runs: FaultRuns) -> SoakOutcome:
    outcome = runs.run("undisturbed")
    assert problems_of(outcome, []) == []
    assert outcome.summary["eval_after"]["n"] >= 500, "3 points would mean nothing"
    for mode in ("greedy", "sampled"):
        assert outcome.accuracy(mode) >= 90.0, "it has hardly learned: nothing could be lost"
    return outcome


def disturbed(
    runs: FaultRuns, undisturbed: SoakOutcome, name: str, kinds: list[str], capsys: pytest.CaptureFixture[str]
) -> SoakOutcome:
    """Make the run and check what holds after any fault: all counts, nothing trained twice, accuracy."""
    faults = runs.draw(kinds)
    outcome = runs.run(name, faults)
    with capsys.disabled():
        print(f"\n{table_of(undisturbed)}\n{table_of(outcome)}")
    assert problems_of(outcome, faults) == []
    assert losses_of_accuracy(undisturbed, outcome) == []
    return outcome


def test_lost_parts_are_replaced_and_the_run_goes_on(
    runs: FaultRuns, undisturbed: SoakOutcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines, controller, queue, workers of rewards and agents; stale file handles between them.

    An engine is killed while it is idle, generates, and in a publication; it is stopped in the latter two, and 20 times
    slower. (How soon a run goes on is asserted by runs that lose their only engine.)
    """
    files = [] if left_out(FAULTS, why_no_handles()) else ["stale-files"]
    outcome = disturbed(runs, undisturbed, "lost-parts", LOST_ENGINES + LOST_PARTS + files, capsys)
    assert not outcome.rolled_back, "ranks began again"


def test_the_only_engine_is_lost_and_the_run_learns_what_it_would_have_learned(
    assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed while it generates and in a publication, and stopped in both; both runs have one engine."""
    kinds = ["kill-engine", "kill-engine-in-sync", "hang-engine", "hang-engine-in-sync"]
    runs = FaultRuns(assets.directory, tmp_path, STEPS, MINUTES, [KINDS[name] for name in kinds], replicas=1)
    outcome = disturbed(runs, undisturbed_run(runs), "only-engine", kinds, capsys)
    assert not outcome.rolled_back, "ranks began again"


def test_lost_ranks_and_a_lost_job_resume_from_the_newest_sound_checkpoint(
    runs: FaultRuns, undisturbed: SoakOutcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank is killed, and later every process, after which a byte of the newest checkpoint is another one."""
    outcome = disturbed(runs, undisturbed, "lost-ranks", LOST_RANKS, capsys)
    assert outcome.rolled_back, "nothing was resumed"
