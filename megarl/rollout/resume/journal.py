"""The rollout journal: keeps generated tokens on disk while a resumed run could use them.

Every `rollout.journal_s` seconds a background task writes the finished groups, and the progress of unfinished ones if
it has grown. A restarted trainer resumes from a checkpoint (`begin`). Once the version of its weights is known
(`candidates`), groups that the checkpoint has not settled are reused as far as the bound on staleness allows: finished
ones as they are, others from their tokens. A journal that cannot be written or read costs only these groups: they are
drawn again.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.resume.group_progress import GroupProgress, UnfinishedGroup
from megarl.rollout.resume.journal_file import JournalFile, groups_started
from megarl.rollout.resume.journal_records import (
    EpochRecord,
    encode_group,
    encode_unfinished,
    newest_version,
    read_head,
)
from megarl.rollout.resume.kept_groups import History, JournaledGroup, KeptGroups, Retention, SupersededRecords
from megarl.rollout.resume.lineage import INITIAL, Lineage, lineage_content, next_epoch, read_lineage
from megarl.rollout.tasks.prompts import PromptSource, PromptTask

logger = logging.getLogger(__name__)

JOURNAL_FILE = "rollout.journal"
FORMAT = 2  # of the records; other formats are not read
PENDING_BYTES = 8 << 20  # written at once if this much waits
GROUPS_AT_ONCE = 16  # checked for new tokens before other tasks run
ROUTED_GROWTH = 1.25  # experts take hundreds of bytes per token: a group is written again after this growth
SLACK_BYTES = 64 << 20  # growth of the file before it is searched for removable records
# Removed keys with their fixed values: the digests in journals of earlier releases include them.
_GONE: dict[str, dict[str, float]] = {
    "agent": {"act_attempts": 3},
    "reward": {"min_errors": 16},
    "sampling": {
        "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    },
}  # fmt: skip
# Keys that earlier releases lack; None keeps the digest.
_ADDED = {"gpu_share", "images_field", "tools_field"}
Unfinished = tuple[int, GroupProgress, UnfinishedGroup]
_BEFORE_A_CALL = "a tool whose calls must not be repeated was about to be called"


class RolloutJournal:
    """The controller's state for resuming: the lineage of the history, and the file of groups with tokens."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        # A deterministic run draws its groups again, in the order of an uninterrupted run.
        self.every_s = 0.0 if config.run.deterministic else config.rollout.journal_s
        self.resuming = False  # from `begin` to `begin_epoch`
        self._pace, self._identity = pace_of(config), identity(config)
        self._timeout_s = config.timeouts.rpc_s
        self._continues = config.rollout.partial_rollout  # else each response is of one version
        self._growth = ROUTED_GROWTH if config.trainer.router_replay == "r3" else 1.0
        self._file = JournalFile(run_dir / JOURNAL_FILE)
        self._lineage: Lineage = ()
        self._resumed: tuple[Lineage, History] = INITIAL, History(-1, 0, frozenset())
        self._kept = KeptGroups([])
        self._retention: Retention | None = None
        self._epoch = b""  # the record of the current epoch, until it is written
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._full = asyncio.Event()
        self._one_writer = asyncio.Lock()  # of unfinished groups: later records must be newer
        self._urgent: set[int] = set()  # unfinished groups that wait to be written
        self._settled = False  # a checkpoint is complete; the groups it settles are still in the file
        self._live_bytes = 0  # after the last search for removable records
        self._uncounted = False  # the head could not be written; logged once

    def started(self) -> int:
        """Return how many groups any process of this run has started; 0 if that cannot be read."""
        try:
            return groups_started(self._file.path)
        except OSError as error:
            logger.warning("%s cannot be read, so too few groups count as rolled back: %r", self._file.path, error)
            return 0

    def count(self, started: int) -> None:
        """Record how many groups were ever started, before the last of them starts; a resume counts discarded ones.

        If the write fails, it is repeated with the next groups that start.
        """
        try:
            self._file.count(started)
            self._uncounted = False
        except OSError as error:
            if not self._uncounted:
                logger.warning("%s cannot be written: a resume would count too few groups: %s", self._file.path, error)
            self._uncounted = True

    def state_dict(self) -> dict[str, Any]:
        """Return the lineage of the history, for the checkpoint."""
        return {"lineage": lineage_content(self._lineage)}

    async def begin(self, state: dict[str, Any] | None, settled: History) -> None:
        """Read the file; the run resumes from a checkpoint with `state` that has `settled` groups."""
        if self._file.moved:  # set aside with the results of an attempt without checkpoint: draw its groups again
            self._file.clear()
        else:
            await self.write()
        self._epoch, self._pending, self._pending_bytes = b"", [], 0
        resumed = INITIAL if state is None else read_lineage(state.get("lineage", ()))
        self._resumed, self.resuming, self._retention = (resumed, settled), True, None
        if not self.every_s:
            return
        try:
            self._kept = await asyncio.to_thread(lambda: KeptGroups(self._file.read()))
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            logger.warning("%s cannot be read, its groups are drawn again: %r", self._file.path, error)
            self._kept = KeptGroups([])
            self._file.clear()

    async def candidates(self, version: int, source: PromptSource) -> KeptGroups:
        """Return the groups that a run can reuse when it resumes at `version` with the prompts of `source`."""
        return await asyncio.to_thread(self._candidates, version, source)

    def _candidates(self, version: int, source: PromptSource) -> KeptGroups:
        kept, (resumed, settled) = self._kept, self._resumed
        kept.drop(lambda each: settled.settled(each.group) or not (each.finished or self._continues))
        changed = sorted({name for each in kept.groups.values() for name in each.epoch.changed(self._identity)})
        if others := kept.drop(lambda each: bool(each.epoch.changed(self._identity))):
            logger.warning("%d kept groups are drawn again: %s changed", others, ", ".join(changed))
        kept.resume(resumed, version)
        if others := kept.drop(lambda each: each.head["problem"] != source.draw(each.group).digest):
            logger.warning("%d kept groups are drawn again: their prompts have changed", others)
        # The trainer would refuse them after every start, although healthy engines may answer them well.
        if others := kept.drop(lambda each: each.has_bad_logprobs):
            logger.warning("%d kept groups are drawn again: they have non-finite log-probs", others)
        return kept

    async def begin_epoch(self, version: int, used: Collection[JournaledGroup]) -> None:
        """Begin the restart epoch of a run that resumes at `version` and reuses `used`."""
        (resumed, settled), before = self._resumed, self._kept.lineage
        self._lineage = next_epoch(resumed, version, before)
        self._retention = Retention(self._pace, replace(settled, version=version))
        self._kept, self.resuming = KeptGroups([]), False
        if self.every_s:
            finished = sum(each.finished for each in used)
            logger.info(
                "restart epoch %d: %d finished groups are reused, and %d unfinished ones continue",
                self._lineage[-1].number, finished, len(used) - finished,
            )  # fmt: skip
            self._epoch = EpochRecord(self._lineage, self._identity).encode()
            self._pending, self._pending_bytes = [], 0
            await self.write()

    def note(self, rows: Sequence[Trajectory], prompt: PromptTask) -> None:
        """Take a finished group; it is written soon."""
        if self.every_s and self._retention is not None:
            # Rows may lack the problem's tokens: a failed row has none, and a harness makes its own prompt.
            record = encode_group(rows, prompt.digest)
            self._pending.append(record)
            self._pending_bytes += len(record)
            if self._pending_bytes > PENDING_BYTES:
                self._full.set()

    def note_unfinished(self, progress: Mapping[int, GroupProgress]) -> None:
        """Take the progress of groups that are about to be cancelled; it is written soon."""
        if self.every_s and self._retention is not None:
            # In front: a group that ends during its cancellation already has its last record among the pending ones.
            self._pending[:0] = [_encoded(*each) for each in self._grown(progress.items(), 1.0)]
            self._pending_bytes = sum(map(len, self._pending))

    def _grown(self, groups: Iterable[tuple[int, GroupProgress]], growth: float) -> list[Unfinished]:
        """Return the progress of groups that have grown by more than the factor `growth` since they were written."""
        begun = [(group, each, each.begun()) for group, each in groups] if self._continues else []
        return [one for one in begun if one[2].size > growth * one[1].written]

    async def _take_grown(self, progress: Mapping[int, GroupProgress]) -> list[bytes]:
        """Return the records of `_grown`; let other tasks run, because thousands of loops take long."""
        grown: list[Unfinished] = []
        groups = list(progress.items())
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            grown += self._grown(groups[start : start + GROUPS_AT_ONCE], self._growth)
            await asyncio.sleep(0)
        for _, each, begun in grown:
            each.written = begun.size
        return await asyncio.to_thread(lambda: [_encoded(*each) for each in grown])

    async def persist(self, group: int, progress: Mapping[int, GroupProgress]) -> None:
        """Write a group's progress, and return when it is on disk: a call that must not be repeated follows.

        Groups that wait at the same time are written together. Raises RolloutError if the write fails or takes longer
        than `timeouts.rpc_s`; a hanging write continues in its thread, and none overtakes it. Without a journal nothing
        is written, because no run could continue the group.
        """
        if not self.every_s or self._retention is None or not self._continues:
            return
        self._urgent.add(group)
        writing = asyncio.ensure_future(self._write_urgent(group, progress))
        writing.add_done_callback(_note_end)
        ended, _ = await asyncio.wait({writing}, timeout=self._timeout_s)
        if not ended:
            raise RolloutError(
                f"group {group} waited {self._timeout_s:g} s (timeouts.rpc_s) for {self._file.path} to be written, and "
                f"{_BEFORE_A_CALL}; check the disk"
            )
        writing.result()

    async def _write_urgent(self, group: int, progress: Mapping[int, GroupProgress]) -> None:
        """Write the progress of all waiting groups, including `group` unless another call has written it."""
        async with self._one_writer:
            if group not in self._urgent:  # another call has written it
                return
            groups, self._urgent = self._urgent & set(progress), set()
            records = [_encoded(each, progress[each], progress[each].begun()) for each in sorted(groups)]
            epoch = self._epoch
            try:
                await asyncio.to_thread(self._file.append, [*([epoch] if epoch else []), *records])
            except OSError as error:
                self._urgent |= groups  # the other waiting calls try again
                raise RolloutError(f"{self._file.path} cannot be written, and {_BEFORE_A_CALL}: {error}") from error
            except BaseException:
                self._urgent |= groups
                raise
            if self._epoch == epoch:  # else another epoch began during the write
                self._epoch = b""

    async def write(self, unfinished: Sequence[bytes] = ()) -> bool:
        """Write the records of `unfinished` groups, then the pending ones; return False on failure.

        Pending records are then written later, or dropped if there are too many.
        """
        epoch, records = [self._epoch] if self._epoch else [], list(self._pending)
        if not epoch and not records and not unfinished:
            return True
        written = True
        try:
            await asyncio.to_thread(self._file.append, [*epoch, *unfinished, *records])
            self._epoch = b""
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._file.path, error)
            if self._pending_bytes <= PENDING_BYTES:
                return False
            written = False
        del self._pending[: len(records)]
        self._pending_bytes = sum(map(len, self._pending))
        return written

    async def keep_up(self, history: Callable[[], History], progress: Mapping[int, GroupProgress]) -> None:
        """Write at intervals, and remove useless records after a checkpoint and when the file has doubled. Never ends.

        `history()`: what the run has settled so far. `progress`: of the running groups, kept up to date.
        """
        next_at = time.monotonic() + self.every_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next_at - time.monotonic()):
                    await self._full.wait()
            async with self._one_writer:
                unfinished: list[bytes] = []
                if not self._full.is_set():  # else too many finished groups are pending before the next interval
                    next_at = time.monotonic() + self.every_s
                    unfinished = await self._take_grown(progress)
                self._full.clear()
                if not await self.write(unfinished):
                    for each in progress.values():
                        each.written = 0
            if self._settled or self._file.size > 2 * self._live_bytes + SLACK_BYTES:
                self._settled = False
                await self._tidy(history())

    def saving(self, step: int, history: History) -> None:
        """Record that a checkpoint of the first `step` steps is about to be written."""
        if self._retention is not None:
            self._retention.saving(step, history)

    def saved(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete: the groups it settles are soon removed."""
        if self._retention is not None and self._retention.saved(step):
            self._settled = True

    async def _tidy(self, history: History) -> None:
        retention = self._retention
        assert retention is not None
        superseded = SupersededRecords()

        def useful(record: bytes) -> bool:
            head = read_head(record)
            if head["kind"] == "epoch":
                return True
            return not superseded.later(head) and retention.keeps(head["group"], newest_version(head), history)

        try:
            await asyncio.to_thread(self._file.tidy, lambda record: superseded.count(read_head(record)), useful)
        except OSError as error:
            logger.warning("%s cannot be shortened: %s", self._file.path, error)
        self._live_bytes = self._file.size


def identity(config: Config) -> dict[str, str]:
    """Return digests, by name, of the settings on which a group's trajectories depend."""
    content = _without_added(config.model_dump(mode="json"))
    chosen = {name: content[name] for name in ("data", "sampling", "reward", "agent", "tools")}
    chosen |= {name: content[name] | values for name, values in _GONE.items()}
    chosen |= {"model.path": content["model"]["path"], "run.seed": content["run"]["seed"]}
    if config.teachers:
        chosen["teachers"] = [each | {"placement": "cpu_offload"} for each in content["teachers"]]  # removed too
    if config.trainer.router_replay == "r3":  # groups of other runs have no experts
        chosen["trainer.router_replay"] = "r3"
    chosen["format of the journal"] = FORMAT
    chosen["batch.samples_per_group"] = content["batch"]["samples_per_group"]
    texts = {name: json.dumps(value, sort_keys=True).encode() for name, value in chosen.items()}
    return {name: hashlib.blake2b(text, digest_size=16).hexdigest() for name, text in texts.items()}


def _without_added(content: Any) -> Any:  # noqa: ANN401  # JSON
    """Return a config's content without the unset keys of `_ADDED`."""
    if isinstance(content, list):
        return [_without_added(each) for each in content]
    if not isinstance(content, dict):
        return content
    return {name: _without_added(each) for name, each in content.items() if each is not None or name not in _ADDED}


def _note_end(writing: asyncio.Future[None]) -> None:
    """Retrieve a failure that no caller awaits; the next waiting call raises its own."""
    if not writing.cancelled():
        writing.exception()


def _encoded(group: int, progress: GroupProgress, begun: UnfinishedGroup) -> bytes:
    """Return the record of a group's progress."""
    return encode_unfinished(group, begun, progress.prompt.digest)
