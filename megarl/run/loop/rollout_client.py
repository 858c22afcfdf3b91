"""The connection of all trainer ranks to the rollout controller, which only rank 0 calls.

Every public method is collective over the trainer ranks unless it says otherwise.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar, cast

from megarl.cluster.client.pool_client import PoolClient
from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.common.clocks import GRACE_S
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.rollout.admission.counters import Counters
from megarl.rollout.engine.placement import HeldDevices, own_device, refuse_other_devices, refuse_overlap
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.recorder import Recorder
from megarl.run.step.plan import StepPlan
from megarl.weights.group.protocols import EngineHandles
from megarl.weights.send.sleep import put_to_sleep

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONNECTED: Codec[tuple[SupervisorHandle, list[HeldDevices]]] = codec_of(tuple[SupervisorHandle, list[HeldDevices]])
_DEVICES: Codec[HeldDevices] = codec_of(HeldDevices)
# A text is the reason of a PublicationNeeded: a message has one kind of dataclass.
_REPORTS: Codec[list[SetReport] | str | None] = codec_of(list[SetReport] | str | None)
_EVALUATIONS: Codec[list[FinishedEvaluation] | str] = codec_of(list[FinishedEvaluation] | str)
_NOTHING: Codec[None] = codec_of(None)


class RolloutClient:
    """Talks to the pool after `attach` has connected it. As a `Stateful` part it keeps the committed rollout history.

    `controller`: the connection, on rank 0 once there is one.
    """

    key = "rollout"

    def __init__(self, config: Config, peers: ControlGroup, recorder: Recorder) -> None:
        self._config, self._peers, self._recorder = config, peers, recorder
        self.controller: PoolClient | None = None
        self._history: dict[str, Any] | None = None
        self._saved: int | None = None

    def attach(self, launch: Future[SupervisorHandle] | None) -> SupervisorHandle:
        """Wait for the pool and make it resume this run's history; return its handle on every rank.

        `launch`: the supervisor that is being started, on rank 0 only. Raises RolloutError if an engine and a rank
        hold the same GPU, or with `rollout.share_gpus` if an engine holds one that no rank has.
        """

        def connect() -> tuple[SupervisorHandle, list[HeldDevices]]:
            client = self._connected(launch)
            client.begin(self._history)
            return client.handle, client.devices()

        handle, held = self._peers.on_first_rank(connect, _CONNECTED)
        check = refuse_other_devices if self._config.rollout.share_gpus else refuse_overlap
        check(self._peers.gather(own_device(self._peers.rank), _DEVICES), held)
        return handle

    def await_sleeping_engines(self, launch: Future[SupervisorHandle] | None) -> None:
        """Wait until all engines are up and asleep, because this run's ranks need the GPUs. `launch`: as in `attach`.

        Engines start asleep. In a pool that survived a restart of the ranks they may be awake, or replacing a lost one.
        """

        def connect() -> None:
            replicas = self._connected(launch).engine_handles().replicas()
            put_to_sleep(replicas, self._config.timeouts.rpc_s, start_s=self._config.timeouts.engine_start_s)

        self._peers.on_first_rank(connect, _NOTHING)

    def _connected(self, launch: Future[SupervisorHandle] | None) -> PoolClient:
        """Return the connection to the controller, after the wait for the pool. On rank 0."""
        if self.controller is None:
            assert launch is not None
            timeouts = self._config.timeouts
            handle = launch.result(timeout=timeouts.ray_start_s + timeouts.node_s + GRACE_S / 2)
            self._recorder.load_tokenizer()  # while the engines start
            self.controller = PoolClient.connect(handle, self._config, self._recorder.say)
        return self.controller

    def engine_handles(self) -> EngineHandles | None:
        """Return the handles that the weight sync calls the engines by, on rank 0; None elsewhere. Not collective."""
        return self._call(lambda pool: pool.engine_handles())

    def drain(self) -> None:
        """Wait until all running responses have ended; new ones are held back until `set_version`."""
        self._ask(lambda pool: pool.drain(), _NOTHING)

    def announce(self, version: int) -> None:
        """Report to the controller that engines are about to get `version`. Not collective: only rank 0 acts."""
        self._call(lambda pool: pool.announce(version))

    def set_version(self, version: int) -> None:
        """Report to the controller that every engine serves `version`. Not collective: only rank 0 acts.

        If engines generate during training, it then starts the groups that the version allows.
        """
        overlaps = pace_of(self._config).overlaps
        self._call(lambda pool: pool.set_version(version, admit=overlaps))

    def admit(self, needed: int) -> None:
        """Start every group that the published version allows. Not collective: only rank 0 acts.

        `needed`: the step whose batch the idle trainer takes next.
        """
        self._call(lambda pool: pool.admit(needed))

    def quarantine(self, replica: int, reason: str) -> bool:
        """Take a replica out until the next publication has replaced it, and warn the user; False if that cannot be.

        Not collective: only rank 0 acts, and True elsewhere.
        """
        answer = self._call(lambda pool: pool.quarantine(replica, reason))
        if answer is not None:
            self._recorder.say(f"{reason}; {answer[1]}")
        return answer is None or answer[0]

    def commit(self, step: int, plan: StepPlan) -> Counters | None:
        """Report how every group of the step ended; the controller then frees the rows that it does not use again.

        Return the controller's counters since the start of the history. Not collective: only rank 0 acts, and None
        elsewhere.
        """
        ends = {**asdict(plan.outcome), "trained_groups": plan.trained_groups, "ended": plan.ended}
        return self._call(lambda pool: pool.commit(step, **ends))

    def evaluate(
        self, version: int, label: str, stopped: Callable[[], bool]
    ) -> list[SetReport] | PublicationNeeded | None:
        """Evaluate all sets on the pool; responses go to RUN_DIR/eval_{label}.jsonl.

        Returns None on every rank if `stopped()` becomes true on rank 0 meanwhile.
        """

        def ask(pool: PoolClient) -> list[SetReport] | str | None:
            reports = pool.evaluate_unless(stopped, version, label)
            return reports.reason if isinstance(reports, PublicationNeeded) else reports

        answer = self._ask(ask, _REPORTS)
        return PublicationNeeded(answer) if isinstance(answer, str) else answer

    def start_evaluation(self, version: int, label: str) -> None:
        """Begin to evaluate all sets alongside training. Not collective: only rank 0 acts."""
        self._call(lambda pool: pool.start_evaluation(version, label))

    def take_evaluations(self) -> list[FinishedEvaluation]:
        """Return the evaluations that have finished since the last call, on rank 0; [] elsewhere. Not collective."""
        finished = self._call(lambda pool: pool.take_evaluations()) or []
        assert not isinstance(finished, PublicationNeeded)  # only a waiting trainer gets that
        return finished

    def finish_evaluations(self) -> list[FinishedEvaluation] | PublicationNeeded:
        """Wait for the evaluation that runs alongside training, if there is one, and return what has finished.

        Returns PublicationNeeded on every rank if no replica is left.
        """

        def ask(pool: PoolClient) -> list[FinishedEvaluation] | str:
            finished = pool.take_evaluations(wait_s=self._config.timeouts.generate_s)
            return finished.reason if isinstance(finished, PublicationNeeded) else finished

        answer = self._ask(ask, _EVALUATIONS)
        return PublicationNeeded(answer) if isinstance(answer, str) else answer

    def state_dict(self) -> dict[str, Any]:
        """Return the rollout side's committed history as JSON content. On rank 0."""
        return self._call(lambda pool: pool.state_dict()) or {}

    def saved(self, step: int) -> None:
        """Report that the checkpoint of `step` steps is complete. Not collective: only rank 0 acts."""
        if step != self._saved:
            self._call(lambda pool: pool.saved(step))
            self._saved = step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the history that `attach` makes the pool resume."""
        self._history = state

    def close(self, *, keep_pool: bool) -> None:
        """End the pool (unless kept); bounded, and safe after a failure. Not collective: only rank 0 acts."""
        if not keep_pool:
            self._call(lambda pool: pool.close())

    def _call(self, question: Callable[[PoolClient], T]) -> T | None:
        """Call the controller on rank 0 and return its answer; None on the other ranks."""
        return None if self.controller is None else question(self.controller)

    def _ask(self, question: Callable[[PoolClient], T], codec: Codec[T]) -> T:
        """Call the controller on rank 0 and return its answer on every rank."""
        return self._peers.on_first_rank(lambda: cast(T, self._call(question)), codec)
