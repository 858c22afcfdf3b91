"""The replicas of a run: which exist, which serve, how requests reach them, and how lost ones are replaced.

The config gives the number of replicas at the start. After that only the fleet knows how many there are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.common.errors import NoPlace, NoReplicaLeft, ReplicaFailed, RequestFailed, RolloutError
from megarl.common.held_outputs import hold_within
from megarl.config.schema import Config, TimeoutsConfig
from megarl.rollout.actor_errors import as_rollout_error
from megarl.rollout.devices import HeldDevices
from megarl.rollout.dispatcher import Dispatcher
from megarl.rollout.drain import Call, Hold, RunningCalls
from megarl.rollout.engine_load import EngineLoad
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.membership import Membership
from megarl.rollout.progress_rates import ProgressRates
from megarl.rollout.replacements import Replacements
from megarl.rollout.replica import EndedReplica, ReplicaSpec, replica_name, restart_replica
from megarl.rollout.replica_work import ReplicaWork, rate_metrics
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.response_parts import EngineReport, ResponsePart
from megarl.rollout.responses_so_far import ResponsesSoFar
from megarl.rollout.shared_calls import CallLink
from megarl.telemetry import events

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

# A lost replica that does not answer within this time does not answer the weight sync either.
_RETIRE_S = 2.0
_RESET_S = 5.0  # in which a lost replica that is sound drops its requests

# Every turn of a loop makes some of these calls, so they share Ray calls; and their order is kept.
_SHARED = frozenset({"generate", "report", "end"})

_REPLACED = -1  # stands for the index of a replica that was lost or replaced meanwhile

# Ends an actor and starts a new one of the same index; raises ReplicaFailed if it does not come up.
Restart = Callable[[int, "ActorHandle"], Awaitable["ActorHandle"]]


@dataclass(frozen=True)
class CallTerms:
    """Holds how the fleet treats a call, where that differs from a call for a training group.

    `foreign`: it comes from outside the run, where somebody bounds its time: no replica is lost because a response
    takes long, no publication waits for its end, and a cancelled call ends its requests in the engine, which for
    training a reset does. `of_group`: a harness makes it for one of the run's groups, so publications wait for its end
    as for that of any call for a group. `report_interval_s`: instead of the fleet's own.
    """

    foreign: bool = False
    of_group: bool = False
    report_interval_s: float | None = None


GROUP_TERMS = CallTerms()


@dataclass(frozen=True)
class _Service:
    """A replica as requests were placed on it, and how often it had been lost before."""

    replica: ActorHandle
    losses: int


class Fleet:
    """Holds all replicas: those that serve, those that are lost, and those that join at the next version.

    For an evaluation, some of those that serve can be pinned: they are left out of publications (`pins.py`).

    Requests of one call go to one replica, which reports their tokens when all have ended, and else at intervals. A
    replica that dies or does not report in time is lost, and another one continues its responses from the tokens that
    it has reported. If none is left, they wait for a replacement that is coming. A request that an engine refuses says
    nothing about the engine. A lost replica that turns out to be sound serves again after the next weight sync.
    """

    def __init__(
        self,
        replicas: Mapping[int, ActorHandle],
        timeouts: TimeoutsConfig,
        restart: Restart,
        describe: Callable[[int], str] = str,
        *,
        report_interval_s: float,
        back_pressure: bool,
        sync_restarts: int,
    ) -> None:
        """`replicas`: started EngineReplica actors by index. `describe(index)`: where a replica's log is.

        `report_interval_s`: of how many seconds a lost replica may take the tokens with it. `back_pressure`: whether
        requests are held back from replicas whose KV cache is full. `sync_restarts`: see `Replacements`.
        """
        self._replicas = dict(replicas)
        self.membership = Membership(replicas)
        self._timeouts, self._restart, self._describe = timeouts, restart, describe
        # What an engine holds is missing from a report, so the next one comes earlier by as much.
        self._report_interval_s = report_interval_s - hold_within(report_interval_s)
        self._replacements = Replacements(timeouts, sync_restarts)
        # For as long as running responses may take to end, and then a weight sync with all its attempts.
        self._hold = Hold(timeouts.generate_s + self._replacements.timeout_s)
        self._dispatcher = Dispatcher(self._replicas, back_pressure, self._hold)
        self._calls = RunningCalls()
        self.lost: dict[int, ReplicaFailed] = {}  # all that do not serve, the last one lost at the end
        self._losses: Counter[int] = Counter()
        self._rates = ProgressRates(timeouts.rpc_s)
        self._work = ReplicaWork()
        self._stopping: set[asyncio.Future[EngineReport]] = set()
        self._links: dict[int, CallLink] = {}
        self._replaced_next: set[int] = set()  # lost ones that answer, but must not serve again

    @classmethod
    async def attach(cls, spec: ReplicaSpec, config: Config, *, wait: bool = True) -> Fleet:
        """Wait until the replicas of the run's start exist; without `wait`, one that does not exist has ended.

        Raises RolloutError naming the first that does not within `timeouts.engine_start_s`.
        """
        import ray

        timeouts, count = config.timeouts, config.rollout.replicas
        replicas: dict[int, Any] = {}
        deadline = time.monotonic() + timeouts.engine_start_s
        while len(replicas) < count:
            index = len(replicas)
            try:
                replicas[index] = ray.get_actor(replica_name(index), namespace=spec.namespace)
            except ValueError:
                if not wait:
                    replicas[index] = EndedReplica(index)
                    continue
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"the controller waited {timeouts.engine_start_s:.0f} s for replica {index}"
                    ) from None
                await asyncio.sleep(0.05)
        logs = Path(spec.run_dir) / "logs"
        fleet = cls(
            replicas,
            timeouts,
            lambda index, old: restart_replica(spec, index, old, timeouts),
            lambda index: f"see {logs / f'replica-{index}.log'}",
            report_interval_s=config.rollout.report_interval_s,
            back_pressure=config.rollout.back_pressure,
            sync_restarts=config.weight_sync.restarts,
        )
        if not wait:
            fleet.membership.leave_out(int(path.stem.removeprefix("replica-")) for path in logs.glob("replica-*.log"))
        return fleet

    @property
    def members(self) -> list[int]:
        """Indices of the replicas that take part in the publication that is being made, or else in the next one."""
        return self.membership.members

    @property
    def serving(self) -> list[int]:
        """Indices of the replicas that serve, sorted."""
        return sorted(self._dispatcher.load)

    @property
    def idle(self) -> list[int]:
        """Indices of the replicas that are started, wait for their first weights, or are drained, sorted."""
        return sorted(self.membership.idle - self.lost.keys())

    @property
    def needs_publication(self) -> str:
        """The reason why the trainer must publish its weights now, because only that brings a replica; else empty."""
        if not self.lost or self._dispatcher.open_to(background=False) or self._replacements.under_way:
            return ""
        return str(next(reversed(self.lost.values())))

    def expect_publication(self, publishes: bool) -> None:
        """Record whether a trainer publishes as soon as it is told that it must (`needs_publication`).

        Responses whose last replica is lost then wait for that, instead of ending the run.
        """
        self._replacements.expect(publishes)

    def take_load(self) -> EngineLoad:
        """Return the peaks of all replicas since the last call, as far as they have reported."""
        return self._dispatcher.take_load()

    def take_rates(self) -> dict[str, float]:
        """Return the speed of each replica since the last call as metrics."""
        return rate_metrics(self._work.take())

    async def generate(
        self,
        prefix: Hashable,
        requests: Sequence[GenerateRequest],
        *,
        home: int | None = None,
        deadline: GroupDeadline | None = None,
        background: bool = False,
        tokens: MutableMapping[str, ResponsePart] | None = None,
        near: int | None = None,
        terms: CallTerms = GROUP_TERMS,
    ) -> list[GenerateResult]:
        """Return responses in the order of `requests`. `prefix`, `home` and `near`: see `Router.assign`.

        `tokens`: those that responses have already, by request id; they are continued, and it is kept up to date.
        `terms`: what is different for calls that are not for training groups. `background`: they belong to an
        evaluation beside training, go to its pinned replicas if there are any, and otherwise give way to training.
        They have no time limit of their own: the wait for the evaluation has one.

        Raises RequestFailed if an engine refused them, NoReplicaLeft if the last replica for them was lost and no other
        one is coming, RolloutError if the group fails by its deadline, if no replica has room within
        `timeouts.generate_s`, or if one that works has not ended them within that time.
        """
        responses = ResponsesSoFar(requests, tokens)
        outside = terms.foreign and not terms.of_group
        with self._calls.of(responses, background=background, foreign=outside) as call:
            await self._run(call, prefix, home, deadline, near, terms)
            return call.responses.results()

    async def _run(
        self,
        call: Call,
        prefix: Hashable,
        home: int | None,
        deadline: GroupDeadline | None,
        near: int | None,
        terms: CallTerms,
    ) -> None:
        """Bring every response of a call to its end, on one replica after the other if some are lost."""
        responses, background = call.responses, call.background
        timeout_s = math.inf if background or terms.foreign else self._timeouts.generate_s
        while responses.unfinished:
            if deadline is not None and time.monotonic() >= deadline.at:
                deadline.settle(responses)
                break
            await self._await_replica(responses, deadline, background)
            index = await self._dispatcher.place(
                prefix,
                len(responses.unfinished),
                home,
                begun=responses.tokens > 0,
                background=background,
                deadline=deadline,
                timeout_s=timeout_s,
                near=near,
            )
            if index is None:
                continue  # to the deadline, or to the wait for a replica
            service = _Service(self._replicas[index], self._losses[index])
            try:
                with call.served_by(index):
                    await self._serve(prefix, index, responses, deadline, timeout_s, terms)
            except (ReplicaFailed, RequestFailed) as error:
                ended = self._ended(index, service)
                if isinstance(error, RequestFailed) and ended is None:
                    raise
                responses.interrupt()
                if ended is None:
                    self.lose(index, ReplicaFailed(index, str(error)))
                self._calls.changed()
                count, known = len(responses.unfinished), responses.tokens
                logger.warning("%d responses go on elsewhere from %d reported tokens: %s", count, known, error)

    async def _await_replica(self, responses: ResponsesSoFar, deadline: GroupDeadline | None, background: bool) -> None:
        """Wait until a replica serves such requests, or to the deadline.

        Raises NoReplicaLeft, with the reason of the last loss, as soon as no replica is coming, and if none has come
        within the time that all attempts at a weight sync can take.
        """
        if self._dispatcher.open_to(background):
            return
        limit_s = self._replacements.timeout_s
        until = time.monotonic() + limit_s
        wake = until if deadline is None else min(until, deadline.at)
        if self._replacements.coming:
            count, tokens = len(responses.unfinished), responses.tokens
            logger.warning("no replica serves: %d responses with %d tokens wait for a new one", count, tokens)
        while not self._dispatcher.open_to(background):
            if not self._replacements.coming:
                raise self._none_left("")
            if time.monotonic() >= wake:
                if wake < until:
                    return
                waited = f"{limit_s:.0f} s (timeouts.weight_sync_s and engine_start_s)"
                raise self._none_left(
                    f"{len(responses.unfinished)} responses waited {waited} for a new replica after: "
                )
            await self._replacements.wait(wake)

    def _none_left(self, waited: str) -> NoReplicaLeft:
        none = ReplicaFailed(-1, "all replicas have left the pool")
        index, reason = next(reversed(self.lost.items()), (-1, none))
        error = NoReplicaLeft(index, f"{waited}{reason}")
        error.__cause__ = reason
        return error

    async def _serve(
        self,
        prefix: Hashable,
        index: int,
        responses: ResponsesSoFar,
        deadline: GroupDeadline | None,
        timeout_s: float,
        terms: CallTerms,
    ) -> None:
        """Have a replica work on the unfinished responses, which are placed on it, until all have ended.

        At the deadline, or when it is drained, the replica stops the others, which stay unfinished.

        Raises ReplicaFailed if the replica is lost or replaced, or if a report does not come within `timeouts.rpc_s` of
        the time when it is due; RolloutError if responses are unfinished after `timeout_s`, which a replica that works
        stops.
        """
        service = _Service(self._replicas[index], self._losses[index])
        until = time.monotonic() + timeout_s
        interval_s = terms.report_interval_s or self._report_interval_s
        left = len(responses.unfinished)
        call: tuple[str, object] = ("generate", responses.send(index))

        def holder() -> int:
            return index if self._ended(index, service) is None else _REPLACED

        self._work.begin(index, time.monotonic())
        try:
            while left:
                if (reason := self._ended(index, service)) is not None:
                    if not (self._is_drained(index) and self._replicas.get(index) is service.replica):
                        raise reason
                    left -= await self._end(prefix, index, responses, holder)
                    responses.move()
                    return
                left_s = until - time.monotonic()
                if left_s <= 0:
                    left -= await self._end(prefix, index, responses, holder)
                    if left:
                        raise responses.unfinished_at(f"after {timeout_s:g} s (timeouts.generate_s) in replica {index}")
                    return
                deadline_s = math.inf if deadline is None else max(deadline.at - time.monotonic(), 0.0)
                wait_s = min(interval_s, left_s, deadline_s)
                report = await self.call(index, *call, wait_s, timeout_s=wait_s + self._timeouts.rpc_s)
                self._work.note(index, report.tokens, time.monotonic())
                self._note_progress(index, service, responses.progress(report.parts))
                ended = responses.add(report.parts)
                self._dispatcher.reported(prefix, holder(), ended, report.load)
                left -= ended
                if left and deadline is not None and time.monotonic() >= deadline.at:
                    left -= await self._end(prefix, index, responses, holder)
                    return
                call = ("report", responses.reported)
        except asyncio.CancelledError:
            if terms.foreign:
                self._stop(index, service, responses.reported)
            raise
        finally:
            self._work.end(index, time.monotonic())
            self._dispatcher.release(prefix, holder(), left)

    def _stop(self, index: int, service: _Service, reported: dict[str, int]) -> None:
        """Have a replica stop requests that nobody waits for any more, and do not wait for that either."""
        if self._replicas.get(index) is not service.replica:
            return
        stopping = asyncio.ensure_future(self._link(index).call("end", reported))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopped)

    def _stopped(self, stopping: asyncio.Future[EngineReport]) -> None:
        self._stopping.discard(stopping)
        if not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.info("requests were not stopped: %s", error)  # the replica has died, or dropped them before

    async def _end(self, prefix: Hashable, index: int, responses: ResponsesSoFar, holder: Callable[[], int]) -> int:
        """Have a replica stop its unfinished responses; add their last tokens. Return how many ended with them."""
        report = await self.call(index, "end", responses.reported, timeout_s=self._timeouts.rpc_s)
        self._work.note(index, report.tokens, time.monotonic())
        ended = responses.add_last(report.parts)
        self._dispatcher.reported(prefix, holder(), ended, report.load)
        return ended

    def _note_progress(self, index: int, service: _Service, progress: tuple[int, float]) -> None:
        """Lose a replica that is much slower than the others.

        Its work goes on elsewhere, and the next sync replaces it. The last one for training stays.
        """
        if self._ended(index, service) is not None:
            return
        reason = self._rates.note(index, *progress, time.monotonic())
        if reason and self.serves_without(index):
            self._replace_next(index, reason)

    def _replace_next(self, index: int, reason: str) -> None:
        """Send nothing more to a replica that answers, and have the next sync replace it."""
        self._replaced_next.add(index)
        self.lose(index, ReplicaFailed(index, f"replica {index} {reason}; {self._describe(index)}"))
        logger.warning("replica %d %s; it is drained and replaced", index, reason)

    def quarantine(self, index: int, reason: str) -> tuple[bool, str]:
        """Take a replica out because of what it generates; the next sync replaces it.

        Its work goes on elsewhere. The last one for training stays. Returns whether it was taken out, and in words.
        """
        if index not in self._replicas or index in self.lost:
            return False, f"replica {index} does not serve any more; the next publication brings or replaces it"
        if not self.serves_without(index):
            return False, f"replica {index} stays, because no other replica serves training"
        self._replace_next(index, f"was quarantined by the trainer: {reason}")
        return True, f"replica {index} is quarantined until the next publication has replaced it"

    def _ended(self, index: int, service: _Service) -> ReplicaFailed | None:
        """Return why a replica does not work on what was placed on it any more; None if it does."""
        if self._replicas.get(index) is not service.replica:
            return ReplicaFailed(index, f"replica {index} has been replaced")
        if index in self.lost:
            return self.lost[index]
        if self._is_drained(index):
            return ReplicaFailed(index, f"replica {index} is drained")
        if self._losses[index] != service.losses:
            return ReplicaFailed(index, f"replica {index} was lost, and serves again without its requests of before")
        return None

    async def call(self, index: int, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call one method of one replica and return its result, whose type is the method's.

        Raises RequestFailed for a request that the engine refused, ReplicaFailed for any other failure and after
        `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if method in _SHARED:
                    return await self._link(index).call(method, *args)
                return await getattr(self._replicas[index], method).remote(*args)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._late(index, method, timeout_s) from None
            raise as_rollout_error(index, method, error, self._describe(index)) from error

    def _link(self, index: int) -> CallLink:
        link, replica = self._links.get(index), self._replicas[index]
        if link is None or link.replica is not replica:
            link = self._links[index] = CallLink(replica, self._timeouts.rpc_s)
        return link

    def _late(self, index: int, method: str, waited_s: float) -> ReplicaFailed:
        return ReplicaFailed(index, f"waited {waited_s:.0f} s for replica {index} to {method}; {self._describe(index)}")

    def lose(self, index: int, reason: ReplicaFailed) -> None:
        """Send nothing more to a replica; its unfinished responses go on elsewhere after its next report."""
        if index in self._replicas and index not in self.lost:
            self.lost[index] = reason
            events.fault("engine", str(reason), replica=index)
            self._withdraw(index)

    def _withdraw(self, index: int) -> None:
        """Place nothing more on a replica, and count nothing more of what it works on."""
        self._losses[index] += 1
        self._rates.forget(index)
        self._dispatcher.remove(index)

    def _is_drained(self, index: int) -> bool:
        return index in self.membership.drained | self.membership.leaving

    def state_of(self, index: int) -> str:
        """Return what a replica does, in one word."""
        members, pins = self.membership, self._dispatcher.pins
        states = {
            "starting": index in members.starting,
            "leaving": index in members.leaving,
            "joining": index in members.new or self._replacements.comes(index),
            "lost": index in self.lost,
            "drained": index in members.drained,
            "evaluating": index in pins.pinned,
            "outdated": index in pins.reserved,
        }
        return next((state for state, is_so in states.items() if is_so), "serving")

    @property
    def report_bound_s(self) -> float:
        """The longest time until a replica has reported, or is lost."""
        return self._report_interval_s + 2 * self._timeouts.rpc_s

    def serves_without(self, index: int) -> bool:
        """Tell whether another replica serves training."""
        return bool(self._dispatcher.open_to(background=False) - {index})

    def outstanding(self, index: int) -> int:
        """Return the number of responses on which a replica works, those that a drained one gives up included."""
        return self._calls.on(index)

    def can_end(self, index: int) -> bool:
        """Tell whether the engine of a replica that leaves can end: nothing works on it, with it or for it."""
        return not (self._calls.on(index) or self.membership.needed(index) or self._replacements.comes(index))

    def drain_replica(self, index: int) -> None:
        """Send nothing more to a replica, which stays in the pool; its responses go on elsewhere after its next report.

        It goes on taking part in publications.
        """
        self.membership.drained.add(index)
        self._withdraw(index)

    def admit_drained(self, index: int) -> None:
        """End what `drain_replica` began: the replica serves again after the next publication."""
        self.membership.drained.discard(index)
        if index not in self.lost:
            self.membership.new.add(index)

    def add(self, index: int, replica: ActorHandle) -> None:
        """Add a started replica, whose index `membership.reserve` gave: it serves after the next publication."""
        self._replicas[index] = replica
        self.membership.started(index)

    def leave(self, index: int) -> None:
        """Remove a replica; its responses go on elsewhere. Its engine can be ended as soon as `can_end` is true."""
        self.membership.leaving.add(index)
        self.lost.pop(index, None)
        self._withdraw(index)

    def ended(self, index: int) -> ActorHandle:
        """Forget a replica that has left; return its actor, which is to be ended."""
        self.lost.pop(index, None)
        self.membership.forget(index)
        self._links.pop(index, None)
        return self._replicas.pop(index)

    def give_up(self, index: int) -> ActorHandle:
        """Take a replica out of the pool, in which one is missing then; return its actor, which is to be ended.

        Its responses go on elsewhere from the tokens that it has reported.
        """
        self._withdraw(index)
        self.membership.missing += 1
        return self.ended(index)

    def go_on_without(self, indices: Collection[int]) -> bool:
        """Tell whether a publication without these replicas brings its version to one that serves training."""
        serving = self._dispatcher.open_to(background=False)
        return bool(serving & set(self.members) - set(indices) - self.membership.leaving)

    async def restart(self, indices: Sequence[int]) -> None:
        """Replace replicas by new ones under the same names; they serve after `admit_joining`, and not before.

        One for which no node has room, as after the loss of its node, leaves the pool, unless it would be the last.
        Raises RolloutError if one does not come up. The controller owns them: the actors of a rank would end with the
        rank.
        """

        async def restart_one(index: int) -> None:
            self.lose(index, ReplicaFailed(index, f"replica {index} is being replaced"))
            self._replaced_next.discard(index)
            self.membership.new.discard(index)
            with self._replacements.starting(index):
                try:
                    self._replicas[index] = await self._restart(index, self._replicas[index])
                except Exception as error:
                    self.lost.pop(index, None)  # so that it is the last one again
                    reason = as_rollout_error(index, "restart", error, self._describe(index))
                    self.lose(index, ReplicaFailed(index, str(reason)))
                    raise

        for index in self.membership.leaving:
            self.membership.excuse(index)
        wanted = [index for index in indices if index in self._replicas and index not in self.membership.leaving]
        ends = await asyncio.gather(*(restart_one(index) for index in wanted), return_exceptions=True)
        failures = {index: end for index, end in zip(wanted, ends, strict=True) if end is not None}
        left = set(self.members) - self.membership.drained - failures.keys()
        for error in failures.values():
            if not (isinstance(error, NoPlace) and left):
                raise error
        for index, error in failures.items():
            logger.warning("the pool goes on without replica %d: %s", index, error)
            self.give_up(index)

    async def begin_sync(self) -> None:
        """Record that a weight sync is about to begin, which replaces the replicas that its failure leaves unusable.

        A lost replica may be sound: its report was late, or the network was cut. If it can drop its requests, it serves
        again after the sync. Else it is told to refuse the sync, so that it is replaced, unless a failed sync ends the
        run (`weight_sync.restarts` is 0): it then takes part, and serves no more.
        """
        replaces = self._replacements.begin_sync()
        for index in self.membership.begin_sync():
            self._replacements.join(index)
        lost = [index for index in self.lost if not self._replacements.comes(index)]
        await asyncio.gather(*(self._readmit(index, replaces) for index in lost))

    async def _readmit(self, index: int, replaces: bool) -> None:
        """Let a lost replica join if it is sound; else, if the sync `replaces` those that refuse it, have it refuse."""
        reason = self.lost.get(index)
        try:
            if index not in self._replaced_next:
                await self.call(index, "reset", timeout_s=_RESET_S)
                self._replacements.join(index)
                return
        except RolloutError as error:
            logger.info("replica %d stays lost: %s", index, error)
        if not replaces or index not in self.lost:  # it may have been removed meanwhile
            return
        try:
            await self.call(index, "fail", f"was lost: {reason}", timeout_s=_RETIRE_S)
        except RolloutError as error:
            logger.info("replica %d, which is lost, was not told so: %s", index, error)

    async def drain(self, timeout_s: float) -> None:
        """Hold back all requests that have not begun, and wait until those that have begun have ended.

        They are held back until `admit_joining` or `reset`, and not after a failure. The requests of an evaluation with
        pinned replicas, which a publication leaves out, are neither held back nor waited for; foreign ones that have
        begun are not waited for either. Raises RolloutError naming the replicas and their numbers of requests after
        `timeout_s`.
        """
        self._hold.begin()
        try:
            await self._calls.end(
                timeout_s, lambda call: not call.foreign and self._dispatcher.holds_back(call.background)
            )
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Place what `drain` has held back."""
        self._hold.end()
        self._dispatcher.look_again()

    async def may_begin(self) -> None:
        """Wait until requests are not held back by `drain`. Raises RolloutError if that takes too long."""
        await self._hold.wait("a prompt group")

    def admit_joining(self) -> None:
        """Let all replicas serve training, replaced and new ones too. Call it when a sync is complete.

        Those that the publication has left out (`leave_out`), and drained ones, do not.
        """
        for index in self._replacements.take_joining():
            if self.lost.pop(index, None) is not None:
                events.recovery("engine", f"replica {index} serves again", replica=index)
            if index in self._replicas and index not in self._dispatcher.load and not self._is_drained(index):
                self._dispatcher.add(index)
        self._replacements.end_sync()
        self.membership.end_sync()
        self._dispatcher.pins.published()
        self._let_go()

    def pin(self, count: int) -> frozenset[int]:
        """Let `count` replicas keep their weights and serve requests in the background only; return them.

        Call it when all replicas hold the current weights. At least one stays for training.
        """
        return self._dispatcher.pins.pin(self.serving, count)

    def release(self) -> None:
        """End what `pin` began. A replica that has missed a version serves training after the next publication."""
        self._dispatcher.pins.release()
        self._dispatcher.look_again()

    def leave_out(self) -> frozenset[int]:
        """Return the replicas that the publication which now begins leaves out."""
        return self._dispatcher.pins.leave_out()

    async def reset(self) -> None:
        """Make every engine drop its requests and be ready to serve; replace those that cannot, or are too slow.

        Lost ones serve again after `admit_joining`.
        """
        self._replacements.end_sync()
        self.membership.end_sync()
        self._let_go()
        broken = []

        async def reset_one(index: int) -> None:
            if index in self._replaced_next:
                logger.warning("replacing replica %d: %s", index, self.lost[index])
                broken.append(index)
                return
            try:
                await self.call(index, "reset", timeout_s=self._timeouts.rpc_s)
                if index in self.lost:
                    self._replacements.join(index)
            except RolloutError as error:
                logger.warning("replacing replica %d: %s", index, error)
                broken.append(index)

        await asyncio.gather(*(reset_one(index) for index in self.members))
        await self.restart(sorted(broken))

    async def take_over(self, behind: Collection[int], *, in_sync: bool) -> None:
        """Make every engine drop the requests of a controller that has died. Those that cannot are lost.

        So are those of `behind`, which do not hold the current weights. They serve again, or are replaced, after the
        next sync. `in_sync`: the trainer is in the middle of one.
        """

        async def take(index: int) -> None:
            try:
                await self.call(index, "reset", timeout_s=self._timeouts.rpc_s)
            except ReplicaFailed as error:
                self.lose(index, error)
            if index in behind:
                self.lose(index, ReplicaFailed(index, f"replica {index} has kept earlier weights for an evaluation"))

        if in_sync:
            self._replacements.begin_sync()
            self.membership.begin_sync()
        await asyncio.gather(*(take(index) for index in self.members))
        for index, reason in self.lost.items():
            logger.warning("replica %d does not serve until the next publication: %s", index, reason)

    async def devices(self) -> list[HeldDevices]:
        """Return the devices that each serving replica holds."""
        return [await self.call(index, "devices", timeout_s=self._timeouts.rpc_s) for index in self.serving]
