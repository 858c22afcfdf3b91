"""The journal of the rollout side: generated tokens on the disk, until no run could resume and use them again.

At intervals of `rollout.journal_s` seconds a task in the background writes the groups that have finished, and what
unfinished ones have so far if that has grown. A trainer that starts again resumes from a checkpoint (`begin`); when the
version of its weights is known (`candidates`), groups that the checkpoint has not settled are used again, as far as the
bound on staleness allows: finished ones as they are, the others from the tokens that they have. A journal that cannot
be written or read costs only these groups: they are drawn again.
"""

from __future__ import annotations

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
from megarl.rollout.resume.kept_groups import History, KeptGroup, KeptGroups, Retention, Superseded
from megarl.rollout.resume.lineage import INITIAL, Lineage, lineage_content, next_epoch, read_lineage
from megarl.rollout.tasks.prompts import PromptSource, PromptTask

logger = logging.getLogger(__name__)

JOURNAL_FILE = "rollout.journal"
FORMAT = 2  # of the records; those of another one are not read
PENDING_BYTES = 8 << 20  # written at once if this much waits
GROUPS_AT_ONCE = 16  # that are looked at for what they have more, between which other tasks run
SLACK_BYTES = 64 << 20  # what the file may grow before it is searched for what can be removed
# Keys that are gone, with the values that hold now: the digests in a journal of an earlier version have them.
_GONE: dict[str, dict[str, float]] = {
    "agent": {"act_attempts": 3},
    "sampling": {
        "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    },
}  # fmt: skip
# Keys that an earlier version did not have, of which None changes nothing.
_ADDED = {"gpu_share", "images_field", "tools_field"}
Unfinished = tuple[int, GroupProgress, UnfinishedGroup]
_BEFORE_A_CALL = "a tool whose calls must not be repeated was about to be called"


class RolloutJournal:
    """The controller's part for resuming: the lineage of the history, and the file of groups with tokens."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        # A deterministic run draws its groups again, in the order of an unbroken run.
        self.every_s = 0.0 if config.run.deterministic else config.rollout.journal_s
        self.resuming = False  # from `begin` to `begin_epoch`
        self._pace, self._identity = pace_of(config), identity(config)
        self._timeout_s = config.timeouts.rpc_s
        self._continues = config.rollout.partial_rollout  # else each response is of one version
        self._file = JournalFile(run_dir / JOURNAL_FILE)
        self._lineage: Lineage = ()
        self._resumed: tuple[Lineage, History] = INITIAL, History(-1, 0, frozenset())
        self._kept = KeptGroups([])
        self._retention: Retention | None = None
        self._epoch = b""  # the record of the present epoch, until it is written
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._full = asyncio.Event()
        self._one_writer = asyncio.Lock()  # of unfinished groups: a later record has to be of a later time
        self._urgent: set[int] = set()  # unfinished groups that wait to be written
        self._settled = False  # a checkpoint is complete, and what it has settled was not looked for yet
        self._live_bytes = 0  # after the last search for what can be removed
        self._uncounted = False  # the head could not be written, which was logged

    def started(self) -> int:
        """Return how many groups any process of this run has started; 0 if that cannot be read now."""
        try:
            return groups_started(self._file.path)
        except OSError as error:
            logger.warning("%s cannot be read, so too few groups count as rolled back: %r", self._file.path, error)
            return 0

    def count(self, started: int) -> None:
        """Note how many groups were ever started, before the last of them starts, so a resume counts the discarded
        ones. If the disk refuses it, it is written with the next groups that start.
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
        """Read what was written; the run resumes from a checkpoint with `state` that has `settled` groups."""
        if self._file.moved:  # with all results of an attempt that has no checkpoint: its groups are drawn again
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
        """Return the groups that a run could use which resumes at `version` with the prompts of `source`."""
        return await asyncio.to_thread(self._candidates, version, source)

    def _candidates(self, version: int, source: PromptSource) -> KeptGroups:
        kept, (resumed, settled) = self._kept, self._resumed
        kept.drop(lambda each: settled.settled(each.group) or not (each.finished or self._continues))
        changed = sorted({name for each in kept.groups.values() for name in each.epoch.changed(self._identity)})
        if others := kept.drop(lambda each: bool(each.epoch.changed(self._identity))):
            logger.warning("%d kept groups are drawn again: %s changed", others, ", ".join(changed))
        kept.resume(resumed, version)
        if others := kept.drop(lambda each: each.head["problem"] != source.draw(each.group).digest):
            logger.warning("%d kept groups are drawn again: they have other prompts now", others)
        # The trainer would refuse them after every start, although sound engines may answer them well.
        if others := kept.drop(lambda each: each.has_bad_logprobs):
            logger.warning("%d kept groups are drawn again: log-probs of theirs are not finite", others)
        return kept

    async def begin_epoch(self, version: int, used: Collection[KeptGroup]) -> None:
        """Begin the restart epoch of a run that resumes at `version` and uses groups again."""
        (resumed, settled), before = self._resumed, self._kept.lineage
        self._lineage = next_epoch(resumed, version, before)
        self._retention = Retention(self._pace, replace(settled, version=version))
        self._kept, self.resuming = KeptGroups([]), False
        if self.every_s:
            finished = sum(each.finished for each in used)
            logger.info(
                "restart epoch %d: %d finished groups are used again, and %d unfinished ones are continued",
                self._lineage[-1].number, finished, len(used) - finished,
            )  # fmt: skip
            self._epoch = EpochRecord(self._lineage, self._identity).encode()
            self._pending, self._pending_bytes = [], 0
            await self.write()

    def note(self, rows: Sequence[Trajectory], prompt: PromptTask) -> None:
        """Take a finished group; it is written soon."""
        if self.every_s and self._retention is not None:
            # Rows need not have the tokens of the problem: a failed one has none, a harness makes a prompt of its own.
            record = encode_group(rows, prompt.digest)
            self._pending.append(record)
            self._pending_bytes += len(record)
            if self._pending_bytes > PENDING_BYTES:
                self._full.set()

    def note_unfinished(self, progress: Mapping[int, GroupProgress]) -> None:
        """Take what groups have that are about to be cancelled; it is written soon."""
        if self.every_s and self._retention is not None:
            # Before what waits: a group that ends while it is being cancelled has its last record there.
            self._pending[:0] = [_encoded(*each) for each in self._grown(progress.items())]
            self._pending_bytes = sum(map(len, self._pending))

    def _grown(self, groups: Iterable[tuple[int, GroupProgress]]) -> list[Unfinished]:
        """Return what groups have that have grown since they were written last."""
        begun = [(group, each, each.begun()) for group, each in groups] if self._continues else []
        return [one for one in begun if one[2].size > one[1].written]

    async def _take_grown(self, progress: Mapping[int, GroupProgress]) -> list[bytes]:
        """Return the records of `_grown`. Of thousands of loops this takes long: other tasks run meanwhile."""
        grown: list[Unfinished] = []
        groups = list(progress.items())
        for start in range(0, len(groups), GROUPS_AT_ONCE):
            grown += self._grown(groups[start : start + GROUPS_AT_ONCE])
            await asyncio.sleep(0)
        for _, each, begun in grown:
            each.written = begun.size
        return await asyncio.to_thread(lambda: [_encoded(*each) for each in grown])

    async def persist(self, group: int, progress: Mapping[int, GroupProgress]) -> None:
        """Write what a group has now, and return when it is on the disk: a call that must not be repeated follows.

        Groups that wait for it at the same time are written together. Raises RolloutError if that fails, or takes more
        than `timeouts.rpc_s`; a write that hangs goes on in its thread, and no other one overtakes it. Without a
        journal nothing is written: then no run could continue the group.
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
        """Write what the groups have that wait for it, `group` among them unless another one has written it."""
        async with self._one_writer:
            if group not in self._urgent:  # another one has written it after it was added
                return
            groups, self._urgent = self._urgent & set(progress), set()
            records = [_encoded(each, progress[each], progress[each].begun()) for each in sorted(groups)]
            epoch = self._epoch
            try:
                await asyncio.to_thread(self._file.append, [*([epoch] if epoch else []), *records])
            except OSError as error:
                self._urgent |= groups  # others that wait with this one try again
                raise RolloutError(f"{self._file.path} cannot be written, and {_BEFORE_A_CALL}: {error}") from error
            except BaseException:
                self._urgent |= groups
                raise
            if self._epoch == epoch:  # else another one has begun while the disk was slow
                self._epoch = b""

    async def write(self, unfinished: Sequence[bytes] = ()) -> bool:
        """Write what waits, after records of `unfinished` groups; return False if that fails.

        Then it is tried again later; what is too much to wait is left out.
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
        """Write at intervals, and remove what has become useless. Never ends.

        That is looked for after a checkpoint, and whenever the file has doubled.

        `history()`: what the run has settled so far. `progress`: of the groups that are running at any time.
        """
        next_at = time.monotonic() + self.every_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next_at - time.monotonic()):
                    await self._full.wait()
            async with self._one_writer:
                unfinished: list[bytes] = []
                if not self._full.is_set():  # else finished groups fill the memory before it is time
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
        """Record that the checkpoint of `step` is complete: what it has settled is soon removed."""
        if self._retention is not None and self._retention.saved(step):
            self._settled = True

    async def _tidy(self, history: History) -> None:
        retention = self._retention
        assert retention is not None
        superseded = Superseded()

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
    """Return digests of the settings on which a group's trajectories depend, by name."""
    content = _without_added(config.model_dump(mode="json"))
    chosen = {name: content[name] for name in ("data", "sampling", "reward", "agent", "tools")}
    chosen |= {name: content[name] | values for name, values in _GONE.items()}
    chosen |= {"model.path": content["model"]["path"], "run.seed": content["run"]["seed"]}
    if config.teachers:
        chosen["teachers"] = content["teachers"]
    if config.trainer.router_replay == "r3":  # groups of other runs have no experts
        chosen["trainer.router_replay"] = "r3"
    chosen["format of the journal"] = FORMAT
    chosen["batch.samples_per_group"] = content["batch"]["samples_per_group"]
    return {name: _digest(json.dumps(value, sort_keys=True).encode()) for name, value in chosen.items()}


def _without_added(content: Any) -> Any:  # noqa: ANN401  # JSON
    """Return the content of a config without the keys of `_ADDED` that are not set."""
    if isinstance(content, list):
        return [_without_added(each) for each in content]
    if not isinstance(content, dict):
        return content
    return {name: _without_added(each) for name, each in content.items() if each is not None or name not in _ADDED}


def _note_end(writing: asyncio.Future[None]) -> None:
    """Record a failure that no caller awaited; the next waiting call raises it."""
    if not writing.cancelled():
        writing.exception()


def _encoded(group: int, progress: GroupProgress, begun: UnfinishedGroup) -> bytes:
    """Return the record of what a group has so far."""
    return encode_unfinished(group, begun, progress.prompt.digest)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
