"""The ranks' connection to the pool: who calls the controller, who reads the queue, and what every rank gets.

Ranks are threads; controller and queue are objects of this process that note every call.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from megarl.common.trust.object_collectives import TEXT, Codec
from megarl.config.schema import AdmissionConfig, Config
from megarl.evaluation.accuracy import ScoredResponse, evaluate_responses
from megarl.evaluation.harness import SetReport
from megarl.queue.dump import read_batch, recorded_steps
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.rollout.admission.counters import Counters
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.step_batches import BatchReady, PublicationNeeded
from megarl.run.loop import batches, rollout_client
from megarl.run.loop.batches import BatchSource, DisagreementError, PreparedBatch, QueueClient
from megarl.run.loop.monitor import AlarmSkipsStep, AlarmStopsRun
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.step.plan import StepPlan
from megarl.trainer.policy import NonFiniteError
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.recorded_steps import make_batch
from tests.support.trainer.thread_ranks import ThreadPeers, ThreadRanks

T = TypeVar("T")
ROWS = {row.key: row for row in make_batch(0)}
TAGS = [row.tag for row in ROWS.values()]
VERSION = 0  # of the weights


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

    keeps: list[bool]
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

    def wait_batch(self, step: int, bound_s: float, *, asleep: bool) -> BatchReady:
        self._note(f"wait_batch {step}")
        if self._failure is not None:
            raise self._failure
        rebuilds = self.rebuilds.pop(0) if self.rebuilds else 0
        metrics = {"rollout/replicas_alive": 2.0}
        return BatchReady(step, list(ROWS), Counters(), metrics, [0, 1, 2, 3], rebuilds=rebuilds)

    def keep(self, step: int, rebuilds: int) -> bool:
        self._note(f"keep {step} of queue {rebuilds}")
        return self.keeps.pop(0) if self.keeps else True

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

    def sample_keys(self, step: int, plan: StepPlan) -> list[str]:
        return [key for key in plan.tags if key.endswith(":0")]


class ThreadChannel:
    """The collectives of `BatchChannel` among threads."""

    def __init__(self, peers: ThreadPeers, ranks: ThreadRanks) -> None:
        self._peers, self.in_replica = peers, ranks.in_replica
        self.hurry = self.relax = self.close = lambda: None

    def wait(self, ask: Callable[[float], T], codec: Codec[T]) -> T:
        return self._peers.on_first_rank(lambda: ask(1.0), codec)

    def gather(self, own: str) -> list[str]:
        return self._peers.gather(own, TEXT)


class Link:
    """What one rank has: the controller's client and the source of batches."""

    def __init__(self, pool: RolloutClient, batches: BatchSource, rank: int) -> None:
        self.pool, self.batches, self.rank = pool, batches, rank

    def take(self) -> PreparedBatch:
        batch = self.batches.take(0, VERSION)
        assert isinstance(batch, PreparedBatch)
        return batch


class Links:
    """Ranks of two replicas with two ranks each; `run` gives every rank a `Link`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
        self.config = config
        self.journal = Journal()
        self.ranks = ThreadRanks(replicas=2, size=2)
        self.failure: Exception | None = None
        self.held_by_ranks: tuple[str, ...] = ()
        self.slow_reader: int | None = None
        self.keeps: list[bool] = []  # whether the controller that gave a batch lives when all ranks have read it
        self.rebuilds: list[int] = []  # of the batches of the controllers, one after the other
        self.dead, self.dead_for = "", {0, 2}  # which calls of the first queue fail, and for which leaders
        self.checks: list[Any] = []  # methods that the readers got
        here = self.ranks._here
        monkeypatch.setattr(batches, "parallel", self.ranks)
        channel = lambda timeouts: ThreadChannel(ThreadPeers(self.ranks, here.rank), self.ranks)  # noqa: E731
        monkeypatch.setattr(batches, "BatchChannel", channel)

        def connect(handle: SupervisorHandle, config: Config, say: Callable[[str], None]) -> FakeClient:
            client = FakeClient(self.journal, here.rank, self.failure)
            client.handle, client.keeps, client.rebuilds = handle, self.keeps, self.rebuilds
            return client

        monkeypatch.setattr(rollout_client, "PoolClient", SimpleNamespace(connect=connect))
        monkeypatch.setattr(batches, "QueueReader", SimpleNamespace(attach=self._reader))
        monkeypatch.setattr(batches, "await_rebuilt", lambda handle, timeout_s: REBUILT)
        ray = lambda handle, timeout_s: self.journal.note(here.rank, f"connect {handle.partition}")  # noqa: E731
        monkeypatch.setattr(batches, "connect_ray", ray)
        own = lambda rank: HeldDevices(f"trainer rank {rank}", "host", self.held_by_ranks)  # noqa: E731
        monkeypatch.setattr(rollout_client, "own_device", own)

    def _reader(self, partition: str, *, check: Callable[[], None], **_: Any) -> FakeReader:
        self.checks.append(check)
        rank = self.ranks._here.rank
        reader = FakeReader(self.journal, rank, fetch_s=0.3 if rank == self.slow_reader else 0.0)
        reader.dead = self.dead if partition == HANDLE.partition and rank in self.dead_for else ""
        return reader

    def run(self, function: Callable[[Link], T], *, attached: bool = True) -> list[T | Exception]:
        def on_rank(peers: ThreadPeers) -> T:
            recorder: Any = FakeRecorder(self.journal, peers.rank)
            pool = RolloutClient(self.config, peers, recorder)  # type: ignore[arg-type]
            source = BatchSource(self.config, peers, recorder)  # type: ignore[arg-type]
            if attached:
                handle = pool.attach(launched() if peers.is_first else None)
                source.attach(handle, pool.controller)
            return function(Link(pool, source, peers.rank))

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


def test_rank_0_connects_to_the_controller_and_leaders_to_the_queue(links: Links) -> None:
    assert links.run(lambda link: link.pool.engine_handles()) == ["handles", None, None, None]
    assert links.journal.of(0) == ["load_tokenizer", "begin None", "connect run.0"]
    assert links.journal.of(2) == ["connect run.0"]
    assert links.journal.of(1) == links.journal.of(3) == []


def test_a_leader_that_waits_for_the_queue_looks_if_the_pool_has_ended(links: Links) -> None:
    links.run(lambda link: None)
    assert [check.__func__ for check in links.checks] == [SupervisorHandle.check_parts] * 2
    assert [check.__self__ for check in links.checks] == [HANDLE] * 2


def test_the_pool_resumes_the_loaded_history(links: Links) -> None:
    def resume(link: Link) -> dict[str, Any]:
        link.pool.load_state_dict({"admission": {"steps": 7}})
        link.pool.attach(launched() if link.rank == 0 else None)
        return link.pool.state_dict()

    assert links.run(resume, attached=False) == [{"admission": {"steps": 1}}, {}, {}, {}]
    assert "begin {'admission': {'steps': 7}}" in links.journal.of(0)


def test_a_gpu_of_both_sides_is_an_error_on_every_rank(links: Links) -> None:
    links.held_by_ranks = ("GPU-7",)
    outcomes = links.run(lambda link: None)
    assert all(isinstance(each, RolloutError) and "GPU-7 on host" in str(each) for each in outcomes)


def test_each_replica_gets_its_own_rows_of_the_batch_by_the_reads_of_its_leader(links: Links) -> None:
    found = links.run(lambda link: link.take())
    for rank, batch in enumerate(found):
        assert isinstance(batch, PreparedBatch)
        assert (batch.step, batch.plan.version, list(batch.plan.tags.values())) == (0, VERSION, TAGS)
        assert batch.timings == {"rollout/replicas_alive": 2.0, "rollout/rebuilds": 0}
        keys = batch.plan.keys_of(rank // 2)
        assert keys and batch.rows == {key: ROWS[key] for key in keys}
        shown = [(ROWS[f"{group}:0"], f"answer {group}") for group in range(4)]
        assert batch.samples == ([] if rank else shown)
    number = len(found[0].rows)  # type: ignore[union-attr]
    read = ["wait_batch 0", "read_tags", f"fetch {number}", "fetch 4", "references [0, 1, 2, 3]", "keep 0 of queue 0"]
    assert links.journal.of(0)[3:] == read and links.journal.of(2)[1:] == ["read_tags", f"fetch {len(found[2].rows)}"]  # type: ignore[union-attr]
    assert links.journal.of(1) == links.journal.of(3) == []


def test_a_failure_of_the_controller_is_raised_on_every_rank(links: Links) -> None:
    links.failure = RolloutError("rollout failed: no engine")
    own, *others = links.run(lambda link: link.take())
    assert own is links.failure
    assert all(isinstance(each, PeerFailedError) and "no engine" in str(each) for each in others)


def test_every_rank_waits_until_running_responses_have_ended(links: Links) -> None:
    """The other ranks would otherwise wait in a collective of the weight sync, whose time-out is shorter."""
    assert links.run(lambda link: link.pool.drain()) == [None] * 4
    assert links.journal.of(0)[3:] == ["drain"]
    assert not any(what == "drain" for rank, what in links.journal.entries if rank)
    links.failure = RolloutError("waited 1800 s for replica 0")
    own, *others = links.run(lambda link: link.pool.drain())
    assert own is links.failure
    assert all(isinstance(each, PeerFailedError) and "waited 1800 s" in str(each) for each in others)


def test_replicas_with_different_plans_train_on_nothing(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_tags(reader: FakeReader, keys: Sequence[str]) -> list[SampleTag]:
        tags = [ROWS[key].tag for key in keys]
        if reader._rank >= 2:  # the second replica has other rewards
            tags = [replace(tag, reward=1.0 - tag.reward) if tag.group_id == 0 else tag for tag in tags[3:]]
        return tags

    monkeypatch.setattr(FakeReader, "read_tags", read_tags)
    outcomes = links.run(lambda link: link.take())
    assert all(isinstance(each, DisagreementError) and "step 0: DP ranks" in str(each) for each in outcomes)
    assert not any(what.startswith("fetch") for _, what in links.journal.entries)


@pytest.mark.parametrize("dumps", [False, True])
def test_batches_are_recorded_whole_if_that_is_configured(links: Links, dumps: bool) -> None:
    links.config = config_of("model", run__dir=str(links.config.run_dir), telemetry__dump_batches=dumps)
    links.run(lambda link: link.take())
    assert recorded_steps(links.config.run_dir / "batches") == [0] * dumps
    if dumps:
        recorded = read_batch(links.config.run_dir / "batches", 0)
        assert recorded.version == VERSION and recorded.trajectories == list(ROWS.values())


def test_rank_0_reports_how_the_groups_ended(links: Links) -> None:
    links.run(lambda link: link.pool.commit(0, link.take().plan))
    assert links.journal.of(0)[-1] == (
        "commit 0 {'trained': 3, 'filtered': 1, 'dropped_stale': 0, 'failed': 0, 'reused': 0, "
        "'trained_groups': [0, 2, 3], "
        "'ended': {'trained': [0, 2, 3], 'filtered': [1], 'dropped_stale': [], 'failed': []}}"
    )
    assert not any(what.startswith("commit") for rank, what in links.journal.entries if rank)


def failing(error: Callable[[], Exception]) -> Callable[[Link], None]:
    """Return a training of step 0 that raises `error`."""

    def fail(link: Link) -> None:
        with link.batches.keep_on_failure(link.take()):
            raise error()

    return fail


@pytest.mark.parametrize("kind", [NonFiniteError, AlarmSkipsStep, AlarmStopsRun])
def test_a_refused_batch_is_kept_whole_and_the_refusal_stays_what_it_is(links: Links, kind: type[Exception]) -> None:
    outcomes = links.run(failing(lambda: kind("the gradient norm is nan")))
    kept = links.config.run_dir / "failed_batch"
    assert {type(each) for each in outcomes} == {kind}
    assert {str(each) for each in outcomes} == {f"step 0: the gradient norm is nan; the batch is kept in {kept}"}
    assert read_batch(kept, 0).trajectories == list(ROWS.values())


@pytest.mark.parametrize("full", [{0}, {2}, {0, 2}])
def test_a_disk_that_takes_no_batch_does_not_hide_the_non_finite_update(
    links: Links, monkeypatch: pytest.MonkeyPatch, full: set[int]
) -> None:
    """The step can still be skipped, and no rank waits for one that has failed."""
    real = batches.write_batch

    def write(*arguments: Any, **options: Any) -> None:
        if links.ranks._here.rank in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(batches, "write_batch", write)

    def refused() -> NonFiniteError:
        error = NonFiniteError("the gradient norm is nan")
        error.updates = 1
        return error

    for rank, outcome in enumerate(links.run(failing(refused))):
        assert isinstance(outcome, NonFiniteError) and outcome.updates == 1
        why = "[Errno 28] No space left on device" if rank in full else "another rank failed to write its share"
        where = links.config.run_dir / "failed_batch"
        assert str(outcome) == f"step 0: the gradient norm is nan; the batch could not be kept in {where}: {why}"


def test_no_rank_ends_before_every_part_of_the_failed_batch_is_written(links: Links) -> None:
    """torchrun kills the other ranks when the first one exits."""
    links.slow_reader = 2
    complete: list[list[int]] = []

    def fail(link: Link) -> None:
        try:
            failing(lambda: NonFiniteError("nan"))(link)
        finally:
            complete.append(recorded_steps(links.config.run_dir / "failed_batch"))

    links.run(fail)
    assert complete == [[0]] * 4


def test_another_failure_keeps_no_batch(links: Links) -> None:
    assert [str(each) for each in links.run(failing(lambda: ValueError("a mistake")))] == ["a mistake"] * 4
    assert not links.config.run_dir.exists()


def test_every_rank_gets_the_evaluation(links: Links) -> None:
    assert links.run(lambda link: link.pool.evaluate(VERSION, "before", lambda: False)) == [[report_of(VERSION)]] * 4
    assert links.run(lambda link: link.pool.evaluate(VERSION, "before", lambda: True)) == [None] * 4
    assert links.journal.of(0).count("evaluate 0 before") == 2


def test_rank_0_starts_and_collects_evaluations_alongside_training(links: Links) -> None:
    """The others neither wait nor learn of it, until all wait for the one that runs."""

    def evaluate(link: Link) -> list[Any]:
        link.pool.start_evaluation(VERSION, "step_2")
        return [link.pool.take_evaluations(), link.pool.finish_evaluations()]

    bound = links.config.timeouts.generate_s
    own, *others = links.run(evaluate)
    assert own == [[evaluation_after(0.0)], [evaluation_after(bound)]]
    assert others == [[[], [evaluation_after(bound)]]] * 3
    assert links.journal.of(0)[3:] == ["start_evaluation 0 step_2"]


def test_every_rank_learns_that_an_evaluation_alongside_training_needs_a_publication(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = PublicationNeeded("replica 0 has died")
    monkeypatch.setattr(FakeClient, "take_evaluations", lambda client, wait_s: needed)
    assert links.run(lambda link: link.pool.finish_evaluations()) == [needed] * 4


def test_every_rank_learns_that_a_batch_needs_a_publication(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = PublicationNeeded("replica 0 has died")
    monkeypatch.setattr(FakeClient, "wait_batch", lambda client, step, bound_s, asleep: needed)
    assert links.run(lambda link: link.batches.take(0, VERSION)) == [needed] * 4


@pytest.mark.parametrize("keep", [True, False])
def test_close_disconnects_and_ends_the_pool_unless_it_is_kept(links: Links, keep: bool) -> None:
    assert links.run(lambda link: (link.batches.close(), link.pool.close(keep_pool=keep))) == [(None, None)] * 4
    assert links.journal.of(0)[3:] == ["close the reader"] + ["close the pool"] * (not keep)
    assert links.journal.of(2)[1:] == ["close the reader"]
    assert links.journal.of(1) == links.journal.of(3) == []


def everything_not_collective(link: Link) -> list[Any]:
    handles = link.pool.engine_handles()
    link.pool.announce(3)
    link.pool.set_version(3)
    link.pool.admit(7)
    state = link.pool.state_dict()
    link.batches.close()
    link.pool.close(keep_pool=False)
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
    links.run(lambda link: link.pool.set_version(3))
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
    outcomes = links.run(lambda link: link.take())
    assert [type(each) for each in outcomes] == [KeyError, PeerFailedError] * 2
    assert all("row 7 is lost" in str(each) for each in outcomes)


@pytest.mark.parametrize("dead_for", [{0}, {2}, {0, 2}])
@pytest.mark.parametrize("call", ["read_tags", "fetch"])
def test_a_batch_that_died_with_the_queue_is_taken_again_by_all_ranks(
    links: Links, call: str, dead_for: set[int]
) -> None:
    """One replica may have read all of its rows, and must not train what the other one has not."""
    links.dead, links.dead_for, links.rebuilds = call, dead_for, [0, 1]
    found = links.run(lambda link: link.take())
    assert [each.rebuilds for each in found] == [1] * 4  # type: ignore[union-attr]
    assert all(each.timings["rollout/rebuilds"] == 1 for each in found)  # type: ignore[union-attr]
    asked = [what for what in links.journal.of(0) if what.startswith(("wait", "keep"))]
    assert asked == ["wait_batch 0", "wait_batch 0", "keep 0 of queue 1"]
    assert links.journal.of(0).count("close the reader") == 1


def test_a_batch_whose_controller_has_died_since_is_taken_again(links: Links) -> None:
    """Rank 0 alone knows of it."""
    links.keeps = [False, True]
    assert all(isinstance(each, PreparedBatch) for each in links.run(lambda link: link.take()))
    asked = [what for what in links.journal.of(0) if what.startswith(("wait", "keep"))]
    assert asked == ["wait_batch 0", "keep 0 of queue 0"] * 2


def test_samples_that_only_rank_0_could_not_read_are_lost_for_all(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, failures = FakeReader.fetch, [PartsLost("a process of the queue has died")]

    def of_samples(reader: FakeReader, keys: Sequence[str]) -> list[Trajectory]:
        if len(keys) == 4 and failures:
            raise failures.pop()
        return fetch(reader, keys)

    monkeypatch.setattr(FakeReader, "fetch", of_samples)
    links.run(lambda link: link.take())
    assert not failures and links.journal.of(0).count("wait_batch 0") == links.journal.of(2).count("read_tags") == 2


def test_a_leader_reads_no_row_of_another_queue(links: Links) -> None:
    """The same keys may be of other samples there."""

    def look(link: Link) -> list[str]:
        queue, found = QueueClient(HANDLE, links.config.timeouts), []
        for rebuilds in (0, 1, 0):
            try:
                queue.read(rebuilds, lambda reader: reader.fetch(list(ROWS)))
                found.append(f"rows of queue {rebuilds}")
            except PartsLost:
                found.append(f"queue {rebuilds} is lost")
        return found

    assert links.run(look) == [["rows of queue 0", "rows of queue 1", "queue 0 is lost"]] * 4
    assert links.journal.of(0).count("close the reader") == 1
