"""A real `Session` whose parts are fakes that note every call, and the loop that uses it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.rundir.run_files import ExitRecord
from megarl.config.schema import Config
from megarl.rollout.admission.counters import Counters
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.run.loop import batches, loop, session, shared_gpus
from megarl.run.loop.batches import BatchSource, PreparedBatch
from megarl.run.loop.session import Session
from megarl.trainer.parking import EVERYTHING

TRAINED = {0, 1, 2}  # the groups, by each step that is not skipped


class Part:
    """A `Stateful` part that notes what it stores and loads."""

    def __init__(self, key: str, journal: list[str]) -> None:
        self.key, self._journal = key, journal

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._journal.append(f"{self.key} resumes")


class FakeRecorder:
    def __init__(self, run: FakeRun) -> None:
        self._note = run.journal.append
        self.parts = [Part(key, run.journal) for key in ("summary", "totals", "files", "metrics")]
        self.timer, self.metrics = None, SimpleNamespace(record=lambda name, value: None)
        self.summary = SimpleNamespace(failed_saves=0)
        self.said: list[str] = []
        self.say = self.said.append
        self.describe_model = lambda info: None
        self.evaluated: dict[str, float] = {}  # of the present weights

    @contextmanager
    def phase(self, name: str, status: str = "") -> Iterator[None]:
        yield

    def status(self, text: str) -> None: ...

    def start_clock(self, steps_done: int = 0) -> None:
        self._note("start the clock")

    def sync(self, version: int, report: str) -> None:
        self._note(f"record {report}")

    def samples(self, step: int, samples: Sequence[str]) -> None:
        self._note(f"write {', '.join(samples)}")

    def step(
        self, step: int, plan: str, timings: object, trained: set[int], version: int, counted: Counters | None
    ) -> None:
        assert counted == Counters(trained=step + 1), "the counters are those of another commit"
        assert trained == (set() if plan.startswith("skipped") else TRAINED), "trained by another step"
        self._note(f"record step {step} of {plan}, which made version {version}")
        self.evaluated = {}

    def evaluation(
        self, steps_done: int, version: int, label: str, reports: Sequence[str], *,
        written_at: int | None = None, began: float | None = None,
    ) -> None:  # fmt: skip
        assert began is not None, "nobody could tell how long the evaluation took"
        at = f"{steps_done}" if written_at is None else f"{steps_done} (written at {written_at})"
        self._note(f"record {label} at {at} of version {version}: {reports}")
        self.evaluated = {f"eval/{label}": version}

    def roll_back(self, step: int) -> None:
        self._note(f"metrics from step {step}")

    def cut_result_files(self, step: int, positions: dict[str, int]) -> None:
        self._note(f"cut files at {step}: {positions}")

    def finish(self, record: ExitRecord) -> None:
        self._note(f"end: {record}")

    def close(self) -> None:
        self._note("close the recorder")


def found_lost(left: dict[Any, int], asked: int | str) -> bool:
    """Return whether all replicas are found lost by what is asked for, and count it."""
    left[asked] = left.get(asked, 0) - 1
    return left[asked] >= 0


class Handles:
    def __str__(self) -> str:
        return "handles"

    def replicas(self) -> list[Any]:
        return []


class FakePool(Part):
    controller = None

    def __init__(self, run: FakeRun) -> None:
        super().__init__("rollout", run.journal)
        self._note, self._run = run.journal.append, run
        self._evaluating: FinishedEvaluation | None = None
        self.complete: int | None = None  # the newest checkpoint that it was given

    def await_sleeping_engines(self, launch: object) -> None:
        self._note("engines sleep")

    def attach(self, launch: object) -> None:
        self._note("attach")

    def engine_handles(self) -> Any:
        return Handles()

    def drain(self) -> None:
        self._note("drain")

    def announce(self, version: int) -> None:
        self._note(f"announce {version}")

    def set_version(self, version: int) -> None:
        self._note(f"set version {version}")

    def admit(self, needed: int) -> None:
        self._note(f"admit {needed}")

    def commit(self, step: int, plan: str) -> Counters:
        self._note(f"commit {step}")
        return Counters(trained=step + 1)

    def saved(self, step: int) -> None:
        self.complete = step

    def evaluate(self, version: int, label: str, stopped: Callable[[], bool]) -> list[str] | PublicationNeeded | None:
        if found_lost(self._run.lost_before, label):
            return PublicationNeeded("replica 0 has died")
        self._note(f"evaluate {label} of version {version}")
        if label == self._run.stop_in:
            self._run.asked = "the time limit is near"
        if stopped():
            self._run.asked = None if self._run.withdraws else self._run.asked
            return None
        return [f"report of version {version}"]

    def start_evaluation(self, version: int, label: str) -> None:
        assert self._evaluating is None, "one at a time"
        self._evaluating = FinishedEvaluation(label, [f"report of version {version}"])  # type: ignore[list-item]
        self._note(f"start evaluation {label} of version {version}")

    def take_evaluations(self) -> list[FinishedEvaluation]:
        return self._finished() if self._run.evaluated else []

    def finish_evaluations(self) -> list[FinishedEvaluation] | PublicationNeeded:
        if self._evaluating is not None and found_lost(self._run.lost_alongside, self._evaluating.label):
            return PublicationNeeded("replica 0 has died")
        return self._finished()

    def _finished(self) -> list[FinishedEvaluation]:
        finished, self._evaluating = self._evaluating, None
        return [finished] if finished is not None else []

    def close(self, *, keep_pool: bool) -> None:
        self._note("disconnect" if keep_pool else "end the pool")


class FakeBatches(BatchSource):
    """Takes, reads and keeps nothing; when it does so is as in a run."""

    run: FakeRun

    def attach(self, handle: object, controller: object) -> None: ...

    def _prepare(self, step: int, version: int, *, asleep: bool = False) -> PreparedBatch | PublicationNeeded:
        run, plan = self.run, f"plan for version {version}"
        run.taking(step)
        if found_lost(run.lost, step) or (asleep and found_lost(run.missing, step)):
            return PublicationNeeded("replica 0 has died")
        run.journal.append(f"take batch {step} for version {version}")
        run.fetching(plan)
        run.journal.append(f"fetch {plan}")
        timings, samples = dict(run.timings.get(step, {})), [f"a sample of batch {step}"]
        return batches.PreparedBatch(step, plan, timings, 0, {}, samples, [])  # type: ignore[arg-type]

    @contextmanager
    def keep_on_failure(self, batch: PreparedBatch) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.run.journal.append(f"keep batch {batch.step}: {error}")
            raise


class FakeSender:
    def __init__(self, run: FakeRun) -> None:
        self._note = run.journal.append

    def connect(self, handles: object) -> None:
        self._note(f"connect the sender to {handles}")

    def publish(self, version: int) -> str:
        self._note(f"publish {version}")
        return f"sync of version {version}"

    def close(self) -> None:
        self._note("close the sender")


class FakeCheckpointer:
    """Saves nothing; a save of a step in `run.failing_saves` fails."""

    def __init__(self, run: FakeRun) -> None:
        self._run, self._note = run, run.journal.append
        self.newest: int | None = None
        self._copied: int | None = None
        self.failure: str | None = None
        self.failed_saves = 0
        self.saved: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, float]] = {}  # those that were added, by the step
        self.directory = SimpleNamespace(state=lambda step: {"files": {"metrics.jsonl": 100 * step}})

    def restore(self, prepare: Callable[[Any], None]) -> dict[str, Any] | None:
        record = self._run.record
        if record is not None:
            prepare(SimpleNamespace(own=self._run.own, step=record["step"]))
            self._note("load the policy")
        return record

    def due(self, steps_done: int) -> bool:
        return steps_done in self._run.due

    def copy(self, step: int) -> None:
        self._note(f"copy {step}")
        self._copied = step

    def has_copy(self, step: int) -> bool:
        return self._copied == step

    def poll(self, *, wait: bool = False) -> bool:
        self._note("complete the save" if wait else "poll the save")
        return True

    def save(self, step: int, record: dict[str, Any], *, wait: bool) -> bool:
        self._note(f"save {step}{' and wait' if wait else ''}")
        self._copied = None
        self.saved[step] = record
        if step in self._run.failing_saves:
            self.failure, self.failed_saves = f"the checkpoint of step {step} could not be saved", self.failed_saves + 1
            return False
        self.newest, self.failure = step, None
        return True

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            self.evaluations[step] = metrics


class FakeChannel:
    """Notes whether the trainer waits; `closed` ends the waits of a test's own."""

    def __init__(self) -> None:
        self.hurried, self.closed = threading.Event(), threading.Event()
        self.hurry, self.relax, self.close = self.hurried.set, self.hurried.clear, self.closed.set


class FakeRun:
    """The state of one run: what its checkpointer restores, when it is asked to stop, which saves fail."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.journal: list[str] = []
        self.record: dict[str, Any] | None = None
        self.own = True  # the restored checkpoint is one of this run directory
        self.stop_after: dict[int, str] = {}  # steps done -> reason
        self.stop_in = ""  # the label of the evaluation during which the run is asked to stop
        self.withdraws = False  # the request, once it has ended the evaluation
        self.asked: str | None = None
        self.timings: dict[int, dict[str, float]] = {}  # what the pool reports with the batch of a step
        self.lost: dict[int, int] = {}  # steps for whose batch all replicas are found lost, and how often
        self.missing: dict[int, int] = {}  # steps whose batch engines would have to generate that sleep, and how often
        self.lost_before: dict[str, int] = {}  # evaluations that find all replicas lost, and how often
        self.lost_alongside: dict[
            str, int
        ] = {}  # the same of evaluations alongside training, while they are waited for
        self.due: set[int] = set()
        self.reference_due: Callable[[int], bool] = lambda steps_done: False
        self.refreshed: list[int] = []  # the steps done when the reference was offered the policy's weights
        self.evaluated = False  # an evaluation alongside training has ended when it is asked for without waiting
        self.failing_saves: set[int] = set()
        self.train: Callable[[], None] = lambda: None
        self.taking: Callable[[int], None] = lambda step: None  # before the batch of a step is taken
        self.fetching: Callable[[str], None] = lambda plan: None  # before the batch of a plan is fetched
        self.channel = FakeChannel()
        self.gather: Callable[[object, object], list[object]] = lambda mine, codec: [mine]
        self.session: Session | None = None

    def build(self) -> Session:
        self.session = Session(self.config, None, io.StringIO(), None)  # type: ignore[arg-type]
        return self.session

    def agree(self) -> str | None:
        assert self.session is not None
        return self.asked or self.stop_after.get(self.session.steps_done)


class FakeMemory:
    """Notes what a rank holds."""

    device_bytes = 0

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self.resident: frozenset[Any] = EVERYTHING

    def hold(self, parts: frozenset[Any]) -> None:
        self.resident = parts
        self._note(f"hold {', '.join(sorted(parts)) or 'nothing'}")


def fake_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """Return a run whose `build` makes a session of fakes; `megarl.run.loop.loop.train` then trains with fake steps."""
    run = FakeRun(config)
    note = run.journal.append

    def train_step(policy: object, plan: str, *rest: object, step: int, watch: object) -> set[int]:
        note(f"train {plan}")
        run.train()
        return TRAINED

    def refresh_reference(steps_done: int) -> bool:
        if due := run.reference_due(steps_done):
            run.refreshed.append(steps_done)
        return due

    def install() -> None:
        note("install the stop vote")

    def save_hf(exporter: object, model: Path, target: Path, **options: object) -> None:
        note(f"export to {target.name}")

    fakes: dict[str, Any] = {
        "ControlGroup": lambda timeouts: SimpleNamespace(
            is_first=True,
            group=None,
            on_first_rank=lambda function, codec: function(),
            gather=run.gather,
            rank=0,
            world=1,
            await_all=lambda *waited: None,
        ),
        "Recorder": lambda config, peers, terminal: FakeRecorder(run),
        "load_info": lambda path: None,
        "parallel": SimpleNamespace(initialize=lambda layout, **options: note("parallel state")),
        "Policy": lambda config, layout, info: (
            note("policy")
            or SimpleNamespace(
                module_chunks=[],
                refresh_reference=refresh_reference,
                show_images=lambda files: None,
                frozen_tensors=(),
                memory=FakeMemory(note),
            )
        ),
        "HFExporter": lambda chunks, info, dtype: None,
        "save_hf": save_hf,
        "BatchSource": type("BatchesOfRun", (FakeBatches,), {"run": run}),
        "RolloutClient": lambda config, peers, recorder: FakePool(run),
        "WeightSender": lambda settings, exporter, host, aside, frozen: FakeSender(run),
        "Checkpointer": lambda config, policy, group, say: FakeCheckpointer(run),
        "StopVote": lambda run_dir, peers, signals: SimpleNamespace(
            agree=run.agree, install=install, asked=lambda: run.asked is not None
        ),
    }
    sleeping = {"put_to_sleep": "engines sleep", "wake_caches": "engines generate"}
    for function, line in sleeping.items():
        monkeypatch.setattr(shared_gpus, function, lambda replicas, rpc_s, held, line=line: note(line) or [])
    for name, fake in fakes.items():
        monkeypatch.setattr(session, name, fake)
    monkeypatch.setattr(batches, "BatchChannel", lambda timeouts: run.channel)
    monkeypatch.setattr(loop, "train_step", train_step)
    return run
