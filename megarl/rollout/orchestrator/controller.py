"""RolloutController: decides what is generated and writes finished groups to the queue. One async actor per run.

It connects the prompt groups (which may start, how each ends), the fleet (which replicas serve), the loop host (which
turns a group into trajectories), the batches of steps, the queue, and evaluation. A trainer that starts or restarts
calls `begin` with the history it resumes; with each publication `announce` and `set_version`, the first of which also
continues kept groups; and for each step `admit`, `wait_batch` and `commit_and_report`. After a failure that ends the
run, every waiting and later call raises it. A controller that replaces a dead one gets the state by `take_over`.
"""

import asyncio
import os
import sys
import time
from functools import partial
from typing import Any, Unpack

from megarl.common.process.memory_tuning import collect_for_loops, exempt_present_objects
from megarl.common.rundir.notices import write_notice
from megarl.config.derived.datasets import reward_functions
from megarl.config.derived.staleness import pace_of
from megarl.config.derived.teachers import teachers_by_set
from megarl.config.schema.agent import SHIPPED_LOOPS
from megarl.evaluation.harness import SetReport
from megarl.queue.transfer import QueueServer, QueueWriter, start_queue
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.counters import Counters
from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.agents.loop_host import LoopHost, SingleTurn, find_loop, routes_spec
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.engine.placement import HEAD_RESOURCE, ROLLOUT_RESOURCE, HeldDevices
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.teachers.teacher_client import attach_teachers
from megarl.rollout.fleet.engine_pool import RequestCoalescer
from megarl.rollout.orchestrator.evaluator import Evaluator, FinishedEvaluation
from megarl.rollout.orchestrator.failover import CommitAnswer, Failover
from megarl.rollout.orchestrator.pool_controller import PoolController
from megarl.rollout.orchestrator.prompt_groups import PromptGroups
from megarl.rollout.orchestrator.step_batches import BatchReady, PublicationNeeded, StepBatches, StepEnds
from megarl.rollout.resume.journal import RolloutJournal
from megarl.rollout.resume.kept_groups import History
from megarl.rollout.tasks.prompts import PromptSource, reward_pool
from megarl.rollout.transport import background
from megarl.rollout.transport.background import BackgroundTasks
from megarl.rollout.workers.agent_worker import AgentWorker
from megarl.rollout.workers.worker_pool import WorkerPool, make_worker_pool
from megarl.telemetry.trace import events


def start_run_queue(spec: ReplicaSpec, units: int, timeout_s: float, partition: str) -> QueueServer:
    """Start the queue's actors, which this process owns; `units`: storage actors. Raises as `start_queue` does."""
    own_head = spec.supervisor is not None
    return start_queue(
        partition,
        namespace=spec.namespace,
        storage_units=units,
        # Several are spread over the rollout nodes, and the run ends if one of these is lost.
        node_resource=HEAD_RESOURCE if own_head and units == 1 else ROLLOUT_RESOURCE,
        timeout_s=timeout_s,
    )


_ASLEEP = "the engines sleep, and groups up to the next publication are missing"


class RolloutController(PoolController):
    """The actor that the supervisor creates; see the module's docstring.

    `worker_kind`: the class of its agent workers.
    """

    worker_kind: type[AgentWorker] = AgentWorker

    def __init__(self, spec: ReplicaSpec, partition: str, *, cwd: str = "", replaces: bool = False) -> None:
        """`cwd`: the launcher's working directory; the config's paths and the user's modules are relative to it.

        `replaces`: it takes the place of a dead controller, with live engines.
        """
        super().__init__(spec, replaces=replaces)
        self.partition = partition
        if replaces:
            events.fault("controller", "the rollout controller, or the queue, died; this controller takes its place")
        if cwd:
            os.chdir(cwd)
            sys.path.insert(0, cwd)
        # Threads of the tokenizers library cost more than they save in decoding, and cause warnings in a later fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        spec.watch_supervisor()
        self._engine_time = BusyClock()
        self._tasks = BackgroundTasks()
        self._journal = RolloutJournal(self.config, self.run_dir)
        self._workers: WorkerPool | None = None
        self._publishes = False  # a trainer would publish to bring back replicas when none is left
        self._cwd = cwd

    async def start(self) -> dict[str, float]:
        """Start queue and reward processes, load prompts and tokenizer, attach to the replicas.

        Returns the seconds that this took, as `start_s`.
        """
        started = time.monotonic()
        config, timeouts = self.config, self.config.timeouts
        shares = config.rollout.agent_workers + 1
        self._rewards = reward_pool(
            reward_functions(config), config.reward, timeouts.engine_start_s,
            partial(write_notice, self.run_dir), shares=shares,
        )  # fmt: skip
        # Slow calls run in threads, outside the event loop.
        self._queue, self._source, self._loop, *_ = await asyncio.gather(
            # This actor owns the queue because its process imports the queue's library anyway.
            asyncio.to_thread(
                start_run_queue, self.spec, config.queue.storage_units, timeouts.engine_start_s, self.partition
            ),
            asyncio.to_thread(PromptSource, config),
            asyncio.to_thread(find_loop, config.agent),
            self._attach_fleet(),
            self._rewards.start(),
        )
        self._coalescer = RequestCoalescer(self._fleet, clock=self._engine_time)
        self._running = RunningGroups(
            config, self._source, self._coalescer.generate, self.partition,
            persist=self._journal.persist, in_workers=bool(config.rollout.agent_workers),
        )  # fmt: skip
        self._running.stats.skipped_prompts = self._source.skipped
        self._writer = await asyncio.to_thread(
            QueueWriter.attach,
            self.partition,
            namespace=self.spec.namespace,
            timeout_s=timeouts.rpc_s,
            who="the rollout controller",
        )
        if config.rollout.agent_workers:
            self._workers = make_worker_pool(
                config.rollout.agent_workers, timeouts, self.spec, self._cwd, self.worker_kind
            )
            await self._workers.start()
        # With workers, it only runs single turns of evaluations.
        self._host = LoopHost(
            self._loop, self._rewards, self._source.decode_all, timeout_s=timeouts.rpc_s,
            toolboxes=self._source.toolboxes, eval_toolboxes=self._source.eval_toolboxes,
            teachers=None if self._workers else attach_teachers(
                teachers_by_set(config), self.spec.namespace, timeouts.generate_s, by_group=config.run.deterministic
            ),
            routes=routes_spec(config.trainer, config.model),
        )  # fmt: skip
        self._join()
        exempt_present_objects()
        collect_for_loops(shipped=self._workers is not None and config.agent.loop in SHIPPED_LOOPS)
        return {"start_s": time.monotonic() - started}

    def _join(self) -> None:
        """Connect the parts that have started: prompt groups, the batches of steps, and evaluations."""
        # Single turns of evaluations stay here, which fixes their order and, in a deterministic run, their replica.
        here = self._workers is None or isinstance(self._loop, SingleTurn)
        self._evaluations = Evaluator(
            self.run_dir, self._source, self._fleet, self._tasks, self._host, None if here else self._workers,
            max_num_seqs=self.config.rollout.max_num_seqs, deterministic=self.config.run.deterministic,
        )  # fmt: skip
        self._groups = PromptGroups(
            self.config,
            self.run_dir,
            source=self._source,
            fleet=self._fleet,
            run_loops=(self._workers or self._host).run_group,
            running=self._running,
            writer=self._writer,
            journal=self._journal,
            tasks=self._tasks,
        )
        self._steps = StepBatches(
            self._groups, self._running, self._source, self._fleet, self._engine_time, self._workers
        )

    @property
    def _admission(self) -> Admission:
        """The admission of the current history."""
        return self._groups.admission

    async def drain(self) -> None:
        """Let running responses end before a publication; hold back new ones until `set_version` or `begin`.

        If all replicas are lost, return at once without a hold: the responses wait for this publication. Raises
        RolloutError naming the replicas after `timeouts.generate_s`; nothing is held back then.
        """
        self._tasks.check()
        ending = asyncio.ensure_future(self._fleet.drain(self.config.timeouts.generate_s))
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=background.LOOK_S)
                self._tasks.check()
                if not ending.done() and self._needs_publication():
                    return
        finally:
            ending.cancel()
        ending.result()

    async def announce(self, version: int) -> None:
        """Record that engines are about to get `version`; a token of an unannounced version ends the run.

        Until `set_version` or `begin`, requests that no replica can take wait for those that the sync restarts, if it
        may be repeated (`weight_sync.restarts`).
        """
        self._tasks.check()
        self._admission.announce(version)
        await self._fleet.begin_sync()

    async def set_version(self, version: int, admit: bool = True) -> Counters:
        """Record that all engines, also restarted ones, serve `version`; with `admit`, start groups. Idempotent."""
        self._tasks.check()
        self._fleet.admit_joining()
        self._admission.set_version(version)
        self._external.serve()
        if self._journal.resuming:
            await self._groups.use_again(version)
        return await self.admit() if admit else self._admission.counters

    async def admit(self, needed: int | None = None) -> Counters:
        """Start every group that the version allows.

        `needed`: the trainer waits for the batch of this step, which may be filled up with reused groups.
        """
        self._tasks.check()
        if needed is not None:
            self._steps.needed = needed
            self._tasks.changed.set()
        self._groups.start()
        return self._admission.counters

    async def wait_batch(self, step: int, timeout_s: float, asleep: bool = False) -> BatchReady | PublicationNeeded:
        """Wait until the groups of `step` are in the queue and return its batch; the same one until `commit`.

        Returns PublicationNeeded if all replicas are lost and a publication of the trainer can bring others; responses
        in flight wait for it. Also, at once, if engines are `asleep` and would have to generate. Raises RolloutError
        naming the cause if rollout failed, and BatchNotReady after `timeout_s`.
        """
        needs = (lambda: _ASLEEP) if asleep else self._needs_publication
        return await self._steps.wait(step, timeout_s, self._tasks, needs, self._working)

    def _working(self) -> str:
        """Return what rewards and agent workers work on, as the end of a sentence."""
        return self._rewards.waiting() + (self._workers.waiting() if self._workers is not None else "")

    async def commit(self, step: int, **ends: Unpack[StepEnds]) -> Counters:
        """Settle the groups of `step` and start the groups that fit then. Raises as `StepBatches.commit` does."""
        self._tasks.check()
        await self._steps.commit(step, **ends)
        return self._admission.counters

    async def commit_and_report(self, step: int, **ends: Unpack[StepEnds]) -> CommitAnswer:
        """Commit as `commit` does, and also return the history that ends with it."""
        counters = await self.commit(step, **ends)
        return CommitAnswer(counters, self._committed_history())

    async def heartbeat(self) -> None:
        """Raise RolloutError if a process of the queue has died or hangs. The supervisor calls it at intervals.

        Also starts replicas again that were lost with their node, if there is room.
        """
        await self.elastic.tend()
        await self._queue.check(self.config.timeouts.rpc_s / 2)  # its error comes before the supervisor's

    async def counters(self) -> Counters:
        """Return the numbers of groups in each state."""
        return self._admission.counters

    async def evaluate(self, version: int, label: str = "") -> list[SetReport] | PublicationNeeded:
        """Evaluate every configured set, greedy and sampled; with `label`, write RUN_DIR/eval_{label}.jsonl.

        Returns PublicationNeeded, and gives up, if all replicas are lost and the waiting trainer can bring others.
        Raises RolloutError after `timeouts.generate_s`.
        """
        self._tasks.check()
        limit_s = self.config.timeouts.generate_s
        return await self._evaluations.run_within(limit_s, version, label, self._needs_publication, self._working)

    async def start_evaluation(self, version: int, label: str) -> None:
        """Start an evaluation alongside training; `take_evaluations` returns it. All replicas must serve `version`."""
        self._tasks.check()
        self._evaluations.start(version, label)

    async def take_evaluations(self, wait_s: float = 0.0) -> list[FinishedEvaluation] | PublicationNeeded:
        """Return the finished evaluations alongside training; with `wait_s`, wait for the running one.

        Returns PublicationNeeded if all replicas are lost during the wait and the trainer can bring others; the
        evaluation continues after the publication. Raises RolloutError after `wait_s`.
        """
        return await self._evaluations.take(wait_s, self._needs_publication)

    async def references(self, group_ids: list[int]) -> dict[int, str]:
        """Return the reference answers of groups, for `samples.jsonl`."""
        return {group: self._source.reference(group) for group in group_ids}

    async def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the committed history and the state of the prompt order."""
        state = self._committed_history()
        self._journal.saving(state["admission"]["steps"], History.of(state["admission"]))
        return state

    def _committed_history(self) -> dict[str, Any]:
        admission = self._admission.state_dict()
        return {"admission": admission, "source": self._source.state_dict(), **self._journal.state_dict()}

    async def saved(self, step: int) -> None:
        """Record that the checkpoint of the first `step` steps is complete; the journal drops what it settles."""
        self._journal.saved(step)

    async def begin(self, state: dict[str, Any] | None) -> Counters:
        """Go back to a committed history (None: an empty one), because the trainer has started or restarted.

        Groups in flight, in the queue or taken by the previous trainer are dropped. Those with tokens continue at the
        first `set_version`, as far as the bound on staleness allows; the others count as rolled back. An engine that
        the previous trainer left in the middle of a weight sync is replaced. Raises ValueError if the prompts are not
        the saved ones.
        """
        self._journal.note_unfinished(self._running.progress)
        await self._external.hold()  # until the first `set_version`
        await self._drop_everything()
        await self._go_back(state)
        await self._fleet.reset()
        self._expect_publications()
        self.elastic.open()
        return self._admission.counters

    async def take_over(self, handover: Failover) -> Counters:
        """Continue in place of a dead controller, with its trainer and engines.

        The trainer keeps the batches of `handover`. All other groups are open: as after a restart of the trainer, those
        in the journal continue, and the others are drawn again. Engines drop the requests of the dead controller; one
        that cannot is lost until the next publication.
        """
        await self._go_back(handover.history)
        for batch in handover.held:
            self._steps.hold(batch)
            for group, reward in batch.rewards.items():
                self._source.finish(group, [] if reward is None else [reward])
        if handover.base is not None:
            self._admission.hold(handover.base, {batch.step: batch.taken for batch in handover.held})
        if handover.history is not None or handover.held:
            self._running.stats.skipped_prompts = 0
        await self._external.hold()
        await self._fleet.take_over(in_sync=handover.announced is not None)
        self.elastic.open()
        self._expect_publications()
        self._steps.needed = handover.needed
        if handover.version is not None:
            self._admission.set_version(handover.version)
            await self._groups.use_again(handover.version)
            if handover.announced is None:
                self._external.serve()
            if handover.evaluation is not None:
                self._evaluations.start(handover.version, handover.evaluation)
        if handover.announced is not None:
            self._admission.announce(handover.announced)
        elif handover.admits:
            self._groups.start()
        events.recovery("controller", "the new rollout controller has taken over")
        return self._admission.counters

    async def _go_back(self, state: dict[str, Any] | None) -> None:
        """Load a committed history, and what the journal adds to it."""
        self._source.reset()
        if state is not None:
            known = state["admission"]
            self._source.load_state_dict(
                state["source"], int(known["next_group"]), int(known["steps"]), len(known["unsettled"])
            )
        self._groups.begin(state["admission"] if state else None)
        # Prompts are skipped once per history: the number belongs to its first batch.
        self._running.stats.skipped_prompts = 0 if state else self._source.skipped
        await self._journal.begin(state, self._groups.history())

    def _expect_publications(self) -> None:
        """Let responses wait for engines that a publication brings, if the trainer may publish at any time."""
        at_once = self.config.rollout.partial_rollout or not pace_of(self.config).overlaps
        self._publishes = at_once and self.config.weight_sync.restarts > 0
        self._fleet.expect_publication(self._publishes)

    def _needs_publication(self) -> str:
        """Return why the trainer must stop waiting and publish its weights; empty if it need not or would not.

        If all replicas are lost, only a publication brings others.
        """
        return self._fleet.needs_publication if self._publishes else ""

    async def _drop_everything(self) -> None:
        await self._tasks.drop()
        self._evaluations.drop()
        await self._coalescer.cancel()
        if self._workers is not None:
            await self._workers.drop_all()
        await self._writer.clear_all()
        self._steps.drop()

    async def members(self) -> list[int]:
        """Return the indices of the replicas that take part in the current publication, or else in the next one."""
        return self._fleet.members

    async def quarantine(self, index: int, reason: str) -> tuple[bool, str]:
        """Take a replica out until the next publication replaces it; return whether it was taken out, and a message."""
        return self._fleet.table.quarantine(index, reason)

    async def devices(self) -> list[HeldDevices]:
        """Return the devices that each serving replica holds."""
        return await self._fleet.devices()

    async def restart_replicas(self, indices: list[int]) -> None:
        """Replace replicas by new ones, which serve after the next `set_version`. Raises RolloutError if one fails."""
        await self._fleet.restart(indices)

    async def replace_replicas_later(self, indices: list[int]) -> None:
        """End replicas; new ones join with a later publication. Raises RolloutError as `restart_replicas`."""
        await self.elastic.replace_later(indices)

    async def shutdown(self) -> None:
        """Cancel the groups in flight, end the reward processes and close the queue."""
        self._tasks.cancel()
        if self._external_requests is not None:
            self._external_requests.close()
        try:
            if self._workers is not None:
                await self._workers.close()
            await self._source.close_tools()
        finally:
            await asyncio.to_thread(self._rewards.close)
            self._queue.close()
            await asyncio.to_thread(events.close_events)
