"""The group of a weight sync, which the trainer ranks form with all engine workers, generation after generation.

Rank 0, the leader, asks the pool for its replicas, has failed ones replaced, and tells the other ranks who the members
are. Those that send then join the group, while the leader has the engines join it, and all learn whether that has
succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.common.errors import PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, await_members, end_forming, names_of
from megarl.weights.plan.buckets import BucketPlan
from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.leader import EngineCalls

logger = logging.getLogger(__name__)


class GroupFormer:
    """Forms groups, one after the other. Create it, and call each of its methods, on every trainer rank.

    `generation`: that of the last group that was formed, or was to be.
    """

    def __init__(
        self,
        settings: SyncSettings,
        store: SyncStore,
        engines: EngineCalls | None,
        rank: int,
        ranks: int,
        connect: Callable[[float], object],
    ) -> None:
        """`engines`: on the leader, None on the other ranks. `rank` of `ranks`: that of this trainer rank.

        `connect(timeout_s)`: connects the trainer ranks that exchange messages in gathers.
        """
        self._settings, self._store, self._engines = settings, store, engines
        self._rank, self._ranks, self._connect = rank, ranks, connect
        self.generation = -1

    def form(
        self, plan: BucketPlan, replace: Sequence[str] = (), *, later: bool = False
    ) -> tuple[Group, bool, tuple[str, ...]]:
        """Form the next generation's group; if replicas fail to join, restart them and form it once more.

        Replaces the replicas `replace` first, or `later` without waiting for the new ones. `plan`: what is published.
        Returns the group, whether all engine workers load in place, and the replicas that were restarted because they
        did not join. Raises WeightSyncError on every rank if it is not formed.
        """
        try:
            return *self._form_once(plan, replace, later), ()
        except WeightSyncError as error:
            if not error.needs_restart or set(replace) & set(error.needs_restart) or self._settings.restarts == 0:
                raise
            logger.warning("restarting %s: %s", ", ".join(error.needs_restart), error)
            return *self._form_once(plan, error.needs_restart), error.needs_restart

    def _form_once(self, plan: BucketPlan, replace: Sequence[str], later: bool = False) -> tuple[Group, bool]:
        self.generation += 1
        group: Group | None = None
        error: WeightSyncError | None = None
        in_place = False
        try:
            members = self._agree_on_members(plan, replace, later)
            rank = members.senders.index(self._rank) if self._rank in members.senders else None
            group = Group(self._store, members, rank, f"trainer rank {self._rank}")
            in_place = self._join(group, plan)
        except WeightSyncError as failure:
            error = failure
        except Exception as failure:
            error = WeightSyncError(f"the weight-sync group could not be formed: {failure}")
            error.__cause__ = failure
        try:
            in_place = self._agree_on_end(error, in_place)
        except BaseException:
            if group is not None:
                group.abort()
            raise
        assert group is not None
        return group, in_place

    def _agree_on_end(self, error: WeightSyncError | None, in_place: bool) -> bool:
        """Tell all ranks on the leader, or learn from it, whether the group is formed; return `in_place` of the leader.

        Raises WeightSyncError, on every rank, if it is not. `error`: that of this rank.
        """
        key = f"g{self.generation}/formed"
        if self._engines is not None:
            fields = None if error is None else [str(error), error.failed_members, error.needs_restart]
            end_forming(self._store, self.generation, None if error is None else str(error))
            self._store.put(key, {"error": fields, "in_place": in_place})
        else:
            wait_s = 2 * self._settings.rpc_s
            formed = self._store.wait(key, wait_s, "trainer rank 0 to form the weight-sync group")
            in_place = formed["in_place"]
            if formed["error"] is not None:
                message, failed_members, needs_restart = formed["error"]
                error = WeightSyncError(message, failed_members=failed_members, needs_restart=needs_restart)
        if error is not None:
            raise error
        return in_place

    @property
    def _controller_s(self) -> float:
        """Seconds in which rank 0 reaches the controller, which may have to be found dead and started anew first."""
        return 8 * self._settings.rpc_s + self._settings.restart_s

    def members_differ(self, members: GroupMembers, sync: int) -> bool:
        """Tell whether the replicas of the pool are others than `members`, before sync number `sync`.

        Raises WeightSyncError on every rank if the pool does not answer.
        """
        key = f"g{self.generation}/s{sync}/members"
        if self._engines is None:
            wait_s = self._controller_s
            answer = self._store.block(key, wait_s)
            if answer is None:
                waited = f"trainer rank {self._rank} waited {wait_s:.0f} s"
                raise PeerTimeout(f"{waited} for trainer rank 0 to ask which replicas there are")
        else:
            answer = self._ask_for_members(self._engines, members)
            if self._ranks > 1:
                self._store.put(key, answer)
                self._store.drop(f"g{self.generation}/s{sync - 3}/members")  # every rank has read that one
        if answer["error"] is not None:
            raise WeightSyncError(f"the replicas of the pool are not known: {answer['error']}")
        return bool(answer["differ"])

    def _ask_for_members(self, engines: EngineCalls, members: GroupMembers) -> dict[str, Any]:
        try:
            return {"differ": tuple(engines.handles.names()) != members.replicas, "error": None}
        except Exception as error:
            return {"differ": False, "error": f"{error}"}

    def _agree_on_members(self, plan: BucketPlan, replace: Sequence[str], later: bool) -> GroupMembers:
        """Return the members of the next generation, which rank 0 finds out and sends to the other ranks."""
        key, settings = f"g{self.generation}/members", self._settings
        if self._engines is None:
            wait_s = self._controller_s + (settings.restart_s if replace else 0.0)
            answer = self._store.wait(key, wait_s, "trainer rank 0 to reach all engine replicas")
            if "error" in answer:
                raise WeightSyncError(answer["error"])
            return GroupMembers.from_json(answer["members"])
        try:
            if replace:
                handles = self._engines.handles
                (handles.replace_later if later else handles.restart)(replace, settings.restart_s)
            members = self._engines.members(self.generation, plan.owners, settings.backend, settings.sync_s)
        except Exception as error:
            self._store.put(key, {"error": str(error)})
            raise
        self._store.put(key, {"members": members.to_json()})
        return members

    def _join(self, group: Group, plan: BucketPlan) -> bool:
        """Join the group if this rank sends. On the leader, also make the engines join, and wait for all members.

        Returns whether all engine workers load in place, which only the leader knows.
        """
        members, timeout_s = group.members, self._settings.rpc_s
        leading: list[Future[Any]] = []
        if self._engines is not None:
            leading = [
                call_in_thread(await_members, self._store.connection(), members, timeout_s),
                call_in_thread(self._engines.connect, members, plan, timeout_s),
            ]
        error: Exception | None = None
        try:
            self._connect(0.9 * timeout_s)  # ends before the leader's wait for all members
            if group.rank is not None:
                group.join(timeout_s)
        except Exception as failure:
            error = failure
            if not isinstance(failure, SyncAborted):
                end_forming(self._store, members.generation, f"{group.name}: {failure}")
        answers = []
        for each in leading:  # their errors are more precise: who did not come, which engine failed, and how
            try:
                answers.append(each.result())
            except WeightSyncError as failure:
                if failure.failed_members and not failure.needs_restart:
                    failure.needs_restart = tuple(names_of(members, failure.failed_members))
                raise
        if error is not None:
            raise error
        return bool(answers and answers[0])
