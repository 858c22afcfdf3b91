"""The ranks' connection to the pool: who calls the controller, who reads the queue, and what every rank gets.

Ranks are threads; controller and queue are objects of this process that note every call.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.common.errors import PartsLost, RolloutError
from megarl.common.process.processes import ProcessId
from megarl.config.schema import AdmissionConfig, Config
from megarl.evaluation.accuracy import ScoredResponse, evaluate_responses
from megarl.evaluation.harness import SetReport
from megarl.queue.dump import read_batch, recorded_steps
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.rollout.admission.counters import Counters
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.ready_batches import BatchReady, PublicationNeeded
from megarl.run.loop.monitor import AlarmSkipsStep, AlarmStopsRun
from megarl.run.pool import batch_collectives, queue_client, rollout_client
from megarl.run.pool.rollout_client import DisagreementError, RolloutClient
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.step.plan import StepBatch, StepPlan, plan_step
from megarl.trainer.policy import NonFiniteError
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.recorded_steps import make_batch
from tests.support.trainer.thread_ranks import ThreadPeers, ThreadRanks

T = TypeVar("T")
ROWS = {row.key: row for row in make_batch(0)}
VERSION = 5  # of the weights; the step is 0


class Journal:
    """Every call of the fakes as (rank, what), in the order in which they were made."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def note(self, rank: int, what: str) -> None:
        with self._lock:
            self.entries.append((rank, what))

    def of(self, rank: int) -> list[str]:
        return [what for at, what in self.entries if at == rank]


def report_of(version: int) -> SetReport:
    """A report of one problem, with an infinite end of an interval."""
    responses = [[ScoredResponse(2.5, answer="3", tokens=4)]]
    greedy = evaluate_responses("held out greedy", responses)
    return SetReport("held out", version, greedy, evaluate_responses("held out sampled", responses), 3, version)


def evaluation_after(wait_s: float) -> FinishedEvaluation:
    return FinishedEvaluation(f"after {wait_s:.0f} s", [report_of(VERSION)])


class FakeClient:
    """The controller: one batch of recorded trajectories."""

    keeps = True
    handle: SupervisorHandle
    rebuilds: list[int]

    def __init__(self, journal: Journal, rank: int, failure: Exception | None = None) -> None:
        self._journal, self._rank, self._failure = journal, rank, failure

    def _note(self, what: str) -> None:
        self._journal.note(self._rank, what)

    def begin(self, state: dict[str, Any] | None) -> None:
        self._note(f"begin {state}")

    def devices(self) -> list[HeldDevices]:
        return [HeldDevices("replica 0", "host", ("GPU-7",))]

    def wait_batch(self, step: int, bound_s: float | None) -> BatchReady:
        self._note(f"wait_batch {step}")
        if self._failure is not None:
            raise self._failure
        rebuilds = self.rebuilds.pop(0) if self.rebuilds else 0
        metrics = {"rollout/replicas_alive": 2.0}
        return BatchReady(step, list(ROWS), Counters(), metrics, [0, 1, 2, 3], [41, 44], rebuilds=rebuilds)

    def keep(self, step: int, rebuilds: int) -> bool:
        self._note(f"keep {step} of queue {rebuilds}")
        return self.keeps

    def drain(self) -> None:
        self._note("drain")
        if self._failure is not None:
            raise self._failure

    def announce(self, version: int) -> None:
        self._note(f"announce {version}")

    def set_version(self, version: int, admit: bool) -> None:
        self._note(f"set_version {version} {admit}")

    def admit(self, needed: int) -> None:
        self._note(f"admit {needed}")

    def references(self, groups: Sequence[int]) -> dict[int, str]:
        self._note(f"references {sorted(groups)}")
        return {group: f"answer {group}" for group in groups}

    def commit(self, step: int, **numbers: object) -> None:
        self._note(f"commit {step} {numbers}")

    def evaluate_unless(self, stopped: Callable[[], bool], version: int, label: str) -> list[SetReport] | None:
        self._note(f"evaluate {version} {label}")
        return None if stopped() else [report_of(version)]

    def start_evaluation(self, version: int, label: str) -> None:
        self._note(f"start_evaluation {version} {label}")

    def take_evaluations(self, wait_s: float = 0.0) -> list[FinishedEvaluation]:
        return [evaluation_after(wait_s)]

    def state_dict(self) -> dict[str, Any]:
        return {"admission": {"steps": 1}}

    def engine_handles(self) -> str:
        return "handles"

    def close(self) -> None:
        self._note("close the pool")


class FakeReader:
    def __init__(self, journal: Journal, rank: int, fetch_s: float = 0.0) -> None:
        self._journal, self._rank, self._fetch_s = journal, rank, fetch_s

    dead = ""

    def _fail(self, call: str) -> None:
        if call == self.dead:
            raise PartsLost("a process of the queue has died")

    def read_tags(self, keys: Sequence[str]) -> list[SampleTag]:
        self._journal.note(self._rank, "read_tags")
        self._fail("read_tags")
        return [ROWS[key].tag for key in keys]

    def fetch(self, keys: Sequence[str]) -> list[Trajectory]:
        self._journal.note(self._rank, f"fetch {len(keys)}")
        time.sleep(self._fetch_s)
        self._fail("fetch")
        return [ROWS[key] for key in keys]

    def close(self) -> None:
        self._journal.note(self._rank, "close the reader")


class FakeRecorder:
    """Chooses the first sample of each group, as the real recorder does at random."""

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal, self._rank = journal, rank

    @contextmanager
    def phase(self, name: str, status: str = "") -> Iterator[None]:
        yield

    def status(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def load_tokenizer(self) -> None:
        self._journal.note(self._rank, "load_tokenizer")

    def sample_keys(self, batch: StepBatch) -> list[str]:
        return [key for key in batch.keys if key.endswith(":0")]


class Links:
    """Ranks of two replicas with two ranks each; `run` gives every rank a `RolloutClient`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
        self.config = config
        self.journal = Journal()
        self.ranks = ThreadRanks(replicas=2, size=2)
        self.failure: Exception | None = None
        self.held_by_ranks: tuple[str, ...] = ()
        self.slow_reader: int | None = None
        self.keeps = True  # whether the controller that gave a batch lives when all ranks have read it
        self.rebuilds: list[int] = []  # of the batches of the controllers, one after the other
        self.dead, self.dead_for = "", {0, 2}  # which calls of the first queue fail, and for which leaders
        self.checks: list[Any] = []  # methods that the readers got
        here = self.ranks._here
        monkeypatch.setattr(rollout_client, "parallel", self.ranks)
        monkeypatch.setattr(batch_collectives, "parallel", self.ranks)

        def connect(handle: SupervisorHandle, config: Config, say: Callable[[str], None]) -> FakeClient:
            client = FakeClient(self.journal, here.rank, self.failure)
            client.handle, client.keeps, client.rebuilds = handle, self.keeps, self.rebuilds
            return client

        monkeypatch.setattr(rollout_client, "PoolClient", SimpleNamespace(connect=connect))
        monkeypatch.setattr(queue_client, "QueueReader", SimpleNamespace(attach=self._reader))
        monkeypatch.setattr(queue_client, "await_rebuilt", lambda handle, timeout_s: REBUILT)
        ray = lambda handle, timeout_s: self.journal.note(here.rank, f"connect {handle.partition}")  # noqa: E731
        monkeypatch.setattr(rollout_client, "connect_ray", ray)
        own = lambda rank: HeldDevices(f"trainer rank {rank}", "host", self.held_by_ranks)  # noqa: E731
        monkeypatch.setattr(rollout_client, "own_device", own)

    def _reader(self, partition: str, *, check: Callable[[], None], **_: Any) -> FakeReader:
        self.checks.append(check)
        rank = self.ranks._here.rank
        reader = FakeReader(self.journal, rank, fetch_s=0.3 if rank == self.slow_reader else 0.0)
        reader.dead = self.dead if partition == HANDLE.partition and rank in self.dead_for else ""
        return reader

    def run(self, function: Callable[[RolloutClient], T], *, attached: bool = True) -> list[T | Exception]:
        def on_rank(peers: ThreadPeers) -> T:
            link = RolloutClient(self.config, peers, FakeRecorder(self.journal, peers.rank))  # type: ignore[arg-type]
            if attached:
                link.attach(launched() if peers.is_first else None)
            return function(link)

        return self.ranks.run(on_rank)


HANDLE = SupervisorHandle("run", "127.0.0.1:1", "run", "run.0", 0, "0", ProcessId(1, 2), "host")


REBUILT = replace(HANDLE, partition="run.0.1", rebuilds=1)


def launched() -> Future[Any]:
    launch: Future[Any] = Future()
    launch.set_result(HANDLE)
    return launch


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Links:
    return Links(monkeypatch, config_of("model", run__dir=str(tmp_path / "run")))


def batch_of(step: int = 0) -> StepBatch:
    return StepBatch(step, VERSION, list(ROWS), [row.tag for row in ROWS.values()], {})


def plan_of(link: RolloutClient, tags: Sequence[SampleTag] = ()) -> StepPlan:
    version = max(row.oldest_version for row in ROWS.values())
    return plan_step(tags or batch_of().tags, link._config, dp_size=2, version=version)


def test_rank_0_connects_to_the_controller_and_leaders_to_the_queue(links: Links) -> None:
    assert links.run(lambda link: link.engine_handles()) == ["handles", None, None, None]
    assert links.journal.of(0) == ["load_tokenizer", "begin None", "connect run.0"]
    assert links.journal.of(2) == ["connect run.0"]
    assert links.journal.of(1) == links.journal.of(3) == []


def test_a_leader_that_waits_for_the_queue_looks_if_the_pool_has_ended(links: Links) -> None:
    links.run(lambda link: None)
    assert [check.__func__ for check in links.checks] == [SupervisorHandle.check_parts] * 2
    assert [check.__self__ for check in links.checks] == [HANDLE] * 2


def test_the_pool_resumes_the_loaded_history(links: Links) -> None:
    def resume(link: RolloutClient) -> dict[str, Any]:
        link.load_state_dict({"admission": {"steps": 7}})
        link.attach(launched() if link._peers.is_first else None)
        return link.state_dict()

    assert links.run(resume, attached=False) == [{"admission": {"steps": 1}}, {}, {}, {}]
    assert "begin {'admission': {'steps': 7}}" in links.journal.of(0)


def test_a_gpu_of_both_sides_is_an_error_on_every_rank(links: Links) -> None:
    links.held_by_ranks = ("GPU-7",)
    outcomes = links.run(lambda link: None)
    assert all(isinstance(each, RolloutError) and "GPU-7 on host" in str(each) for each in outcomes)


def test_every_rank_gets_the_batch_and_one_rank_of_each_replica_reads_it(links: Links) -> None:
    first, *others = links.run(lambda link: link.take_batch(0, VERSION))
    timings = {"rollout/replicas_alive": 2.0, "rollout/rebuilds": 0}
    assert first == StepBatch(0, VERSION, list(ROWS), batch_of().tags, timings, [41, 44])
    assert others == [first] * 3
    assert links.journal.of(0)[3:] == ["wait_batch 0", "read_tags"] and links.journal.of(2)[1:] == ["read_tags"]
    assert links.journal.of(1) == links.journal.of(3) == []


def test_a_failure_of_the_controller_is_raised_on_every_rank(links: Links) -> None:
    links.failure = RolloutError("rollout failed: no engine")
    own, *others = links.run(lambda link: link.take_batch(0, VERSION))
    assert own is links.failure
    assert all(isinstance(each, PeerFailedError) and "no engine" in str(each) for each in others)


def test_every_rank_waits_until_running_responses_have_ended(links: Links) -> None:
    """The other ranks would otherwise wait in a collective of the weight sync, whose time-out is shorter."""
    assert links.run(lambda link: link.drain()) == [None] * 4
    assert links.journal.of(0)[3:] == ["drain"]
    assert not any(what == "drain" for rank, what in links.journal.entries if rank)
    links.failure = RolloutError("waited 1800 s for replica 0")
    own, *others = links.run(lambda link: link.drain())
    assert own is links.failure
    assert all(isinstance(each, PeerFailedError) and "waited 1800 s" in str(each) for each in others)


def test_each_replica_gets_its_own_rows(links: Links) -> None:
    found = links.run(lambda link: (plan_of(link), link.fetch(batch_of(), plan_of(link))))
    for rank, outcome in enumerate(found):
        plan, rows = outcome  # type: ignore[misc]
        keys = plan.keys_of(rank // 2)
        assert keys and rows == {key: ROWS[key] for key in keys}


def test_replicas_with_different_plans_train_on_nothing(links: Links) -> None:
    def disagree(link: RolloutClient) -> Mapping[str, Trajectory]:
        tags = batch_of().tags
        if link._peers.rank >= 2:  # the second replica has other rewards
            tags = [replace(tag, reward=1.0 - tag.reward) if tag.group_id == 0 else tag for tag in tags[3:]]
        return link.fetch(batch_of(step=4), plan_of(link, tags))

    outcomes = links.run(disagree)
    assert all(isinstance(each, DisagreementError) and "step 4: DP ranks" in str(each) for each in outcomes)
    assert not any(what.startswith("fetch") for _, what in links.journal.entries)


def test_no_batch_is_recorded_unless_that_is_configured(links: Links) -> None:
    assert links.run(lambda link: link.record(batch_of(), link.read_whole(batch_of()))) == [None] * 4
    assert not links.config.run_dir.exists()


def test_recorded_batches_are_whole(links: Links) -> None:
    links.config = config_of("model", run__dir=str(links.config.run_dir), telemetry__dump_batches=True)
    links.run(lambda link: link.record(batch_of(), link.read_whole(batch_of())))
    recorded = read_batch(links.config.run_dir / "batches", 0)
    assert recorded.version == VERSION and recorded.trajectories == list(ROWS.values())


def test_rank_0_reads_the_samples_that_are_shown(links: Links) -> None:
    own, *others = links.run(lambda link: link.read_samples(batch_of()))
    assert own == [(ROWS[f"{group}:0"], f"answer {group}") for group in range(4)]
    assert others == [[]] * 3
    assert links.journal.of(0)[3:] == ["fetch 4", "references [0, 1, 2, 3]"]
    assert links.journal.of(2)[1:] == links.journal.of(1) == []


def test_rank_0_reports_how_the_groups_ended(links: Links) -> None:
    links.run(lambda link: link.commit(batch_of(), plan_of(link)))
    assert links.journal.of(0)[3:] == [
        "commit 0 {'trained': 3, 'filtered': 1, 'dropped_stale': 0, 'failed': 0, 'reused': 0, "
        "'ended': {'trained': [0, 2, 3], 'filtered': [1], 'dropped_stale': [], 'failed': []}}"
    ]
    assert links.journal.of(2)[1:] == links.journal.of(1) == []


def test_a_batch_with_a_non_finite_update_is_kept_whole(links: Links) -> None:
    def fail(link: RolloutClient) -> None:
        with link.keep_batch_on_failure(batch_of(step=3)):
            raise NonFiniteError("the gradient norm is nan")

    outcomes = links.run(fail)
    kept = links.config.run_dir / "failed_batch"
    expected = f"step 3: the gradient norm is nan; the batch is kept in {kept}"
    assert [str(each) for each in outcomes] == [expected] * 4
    assert all(isinstance(each, NonFiniteError) for each in outcomes)
    assert read_batch(kept, 3).trajectories == list(ROWS.values())


@pytest.mark.parametrize("kind", [AlarmSkipsStep, AlarmStopsRun])
def test_a_batch_that_an_alarm_refuses_is_kept_and_the_alarm_stays_what_it_is(links: Links, kind: type) -> None:
    def fail(link: RolloutClient) -> None:
        with link.keep_batch_on_failure(batch_of(step=3)):
            raise kind("alarm ess: 0.1 is below 0.5")

    outcomes = links.run(fail)
    assert {type(each) for each in outcomes} == {kind}
    assert {str(each).split(";")[0] for each in outcomes} == {"step 3: alarm ess: 0.1 is below 0.5"}
    assert read_batch(links.config.run_dir / "failed_batch", 3).trajectories == list(ROWS.values())


@pytest.mark.parametrize("full", [{0}, {2}, {0, 2}])
def test_a_disk_that_takes_no_batch_does_not_hide_the_non_finite_update(
    links: Links, monkeypatch: pytest.MonkeyPatch, full: set[int]
) -> None:
    """The step can still be skipped, and no rank waits for one that has failed."""
    real = rollout_client.write_batch

    def write(*arguments: Any, **options: Any) -> None:
        if links.ranks._here.rank in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(rollout_client, "write_batch", write)

    def fail(link: RolloutClient) -> None:
        with link.keep_batch_on_failure(batch_of(step=3)):
            error = NonFiniteError("the gradient norm is nan")
            error.updates = 1
            raise error

    outcomes = links.run(fail)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, NonFiniteError) and outcome.updates == 1
        why = "[Errno 28] No space left on device" if rank in full else "another rank failed to write its share"
        where = links.config.run_dir / "failed_batch"
        assert str(outcome) == f"step 3: the gradient norm is nan; the batch could not be kept in {where}: {why}"


def test_no_rank_ends_before_every_part_of_the_failed_batch_is_written(links: Links) -> None:
    """torchrun kills the other ranks when the first one exits."""
    links.slow_reader = 2
    complete: list[list[int]] = []

    def fail(link: RolloutClient) -> None:
        try:
            with link.keep_batch_on_failure(batch_of()):
                raise NonFiniteError("nan")
        finally:
            complete.append(recorded_steps(links.config.run_dir / "failed_batch"))

    links.run(fail)
    assert complete == [[0]] * 4


def test_another_failure_keeps_no_batch(links: Links) -> None:
    def fail(link: RolloutClient) -> None:
        with link.keep_batch_on_failure(batch_of()):
            raise ValueError("a mistake")

    assert [str(each) for each in links.run(fail)] == ["a mistake"] * 4
    assert not links.config.run_dir.exists()


def test_every_rank_gets_the_evaluation(links: Links) -> None:
    assert links.run(lambda link: link.evaluate(VERSION, "before", lambda: False)) == [[report_of(5)]] * 4
    assert links.run(lambda link: link.evaluate(VERSION, "before", lambda: True)) == [None] * 4
    assert links.journal.of(0).count("evaluate 5 before") == 2


def test_rank_0_starts_and_collects_evaluations_beside_training(links: Links) -> None:
    """The others neither wait nor learn of it, until all wait for the one that runs."""

    def evaluate(link: RolloutClient) -> list[Any]:
        link.start_evaluation(VERSION, "step_2")
        return [link.take_evaluations(), link.finish_evaluations()]

    bound = links.config.timeouts.generate_s
    own, *others = links.run(evaluate)
    assert own == [[evaluation_after(0.0)], [evaluation_after(bound)]]
    assert others == [[[], [evaluation_after(bound)]]] * 3
    assert links.journal.of(0)[3:] == ["start_evaluation 5 step_2"]


def test_every_rank_learns_that_an_evaluation_beside_training_needs_a_publication(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = PublicationNeeded("replica 0 has died")
    monkeypatch.setattr(FakeClient, "take_evaluations", lambda client, wait_s: needed)
    assert links.run(lambda link: link.finish_evaluations()) == [needed] * 4


@pytest.mark.parametrize("keep", [True, False])
def test_close_ends_the_pool_unless_it_is_kept(links: Links, keep: bool) -> None:
    assert links.run(lambda link: link.close(keep_pool=keep)) == [None] * 4
    assert links.journal.of(0)[3:] == ["close the reader"] + ["close the pool"] * (not keep)
    assert links.journal.of(2)[1:] == ["close the reader"]
    assert links.journal.of(1) == links.journal.of(3) == []


def everything_not_collective(link: RolloutClient) -> list[Any]:
    handles = link.engine_handles()
    link.announce(3)
    link.set_version(3)
    link.admit(7)
    link.commit(batch_of(), plan_of(link))
    state = link.state_dict()
    link.close(keep_pool=False)
    return [handles, state]


def test_ranks_that_hold_nothing_do_nothing(links: Links) -> None:
    outcomes = links.run(everything_not_collective)
    assert outcomes == [["handles", {"admission": {"steps": 1}}], *[[None, {}]] * 3]
    assert links.journal.of(1) == links.journal.of(3) == []
    assert links.journal.of(0)[3:6] == ["announce 3", "set_version 3 False", "admit 7"]


@pytest.mark.parametrize(("mode", "admits"), [("sync", False), ("one_step_off", True), ("async", True)])
def test_a_publication_starts_groups_if_generation_runs_ahead(links: Links, mode: str, admits: bool) -> None:
    """If it does not run ahead, an evaluation comes first and is not disturbed."""
    links.config = links.config.model_copy(update={"admission": AdmissionConfig(mode=mode)})
    links.run(lambda link: link.set_version(3))
    assert links.journal.of(0)[3:] == [f"set_version 3 {admits}"]


def test_a_link_that_never_attached_can_be_closed(links: Links) -> None:
    assert links.run(everything_not_collective, attached=False) == [[None, {}]] * 4
    assert links.journal.entries == []


def test_a_leader_that_cannot_read_the_queue_says_so_to_its_replica(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text may have what UTF-8 cannot represent."""

    def lost(reader: FakeReader, keys: Sequence[str]) -> list[SampleTag]:
        raise KeyError("row 7 is lost in \udcff")

    monkeypatch.setattr(FakeReader, "read_tags", lost)
    outcomes = links.run(lambda link: link.take_batch(0, VERSION))
    assert [type(each) for each in outcomes] == [KeyError, PeerFailedError] * 2
    assert all("row 7 is lost" in str(each) for each in outcomes)


@pytest.mark.parametrize("dead_for", [{0}, {2}, {0, 2}])
def test_a_batch_whose_tags_died_with_the_queue_is_taken_again_by_all_ranks(links: Links, dead_for: set[int]) -> None:
    links.dead, links.dead_for, links.rebuilds = "read_tags", dead_for, [0, 1]
    first, *others = links.run(lambda link: link.take_batch(0, VERSION))
    assert isinstance(first, StepBatch) and first.rebuilds == 1 and first.timings["rollout/rebuilds"] == 1
    assert others == [first] * 3
    assert [what for what in links.journal.of(0) if what.startswith("wait")] == ["wait_batch 0"] * 2
    assert links.journal.of(2).count("read_tags") == 2


@pytest.mark.parametrize("dead_for", [{0}, {2}])
def test_rows_that_died_with_the_queue_are_kept_by_no_rank(links: Links, dead_for: set[int]) -> None:
    """One replica has read all of its rows, and must not train what the other one has not."""
    links.dead, links.dead_for = "fetch", dead_for

    def take(link: RolloutClient) -> tuple[bool, bool]:
        try:
            link.fetch(batch_of(), plan_of(link))
            lost = False
        except PartsLost:
            lost = True
        return lost, link.keep(batch_of(), lost=lost)

    assert links.run(take) == [(rank // 2 * 2 in dead_for, False) for rank in range(4)]
    assert not any("keep" in what for what in links.journal.of(0))


@pytest.mark.parametrize("lives", [True, False])
def test_a_batch_is_kept_on_all_ranks_or_on_none(links: Links, lives: bool) -> None:
    """Rank 0 alone knows that the controller which gave it has died since."""
    links.keeps = lives
    assert links.run(lambda link: link.keep(batch_of(), lost=False)) == [lives] * 4
    assert links.journal.of(0)[3:] == ["keep 0 of queue 0"]


def test_samples_that_only_rank_0_could_not_read_are_lost_for_all(links: Links) -> None:
    assert links.run(lambda link: link.keep(batch_of(), lost=link._peers.rank == 0)) == [False] * 4


def test_a_leader_reads_no_row_of_another_queue(links: Links) -> None:
    """The same keys may be of other samples there."""

    def look(link: RolloutClient) -> list[str]:
        found = []
        for rebuilds in (0, 1, 0):
            try:
                link.fetch(replace(batch_of(), rebuilds=rebuilds), plan_of(link))
                found.append(f"rows of queue {rebuilds}")
            except PartsLost:
                found.append(f"queue {rebuilds} is lost")
        return found

    assert links.run(look) == [["rows of queue 0", "rows of queue 1", "queue 0 is lost"]] * 4
    assert links.journal.of(0).count("close the reader") == 1
