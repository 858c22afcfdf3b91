"""Saves and restores a run. Every method is collective over the trainer ranks; only rank 0 writes small files.

A failed save does not end a run: its error is reported, the last checkpoint stays, and the next save tries again.
Order of a save: shards (in the background) -> `.metadata` -> small files -> manifest -> rename -> retention. If a
process is killed before the rename, the previous checkpoint is still the newest.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed import ProcessGroup

from megarl.checkpoint.format.keys import content_metadata
from megarl.checkpoint.format.manifest import FileEntry, Manifest, fsync
from megarl.checkpoint.save.directory import CONFIG_FILE, STATE_FILE, CheckpointDirectory, CheckpointRetention
from megarl.checkpoint.save.resume import Candidate, ResumeError, identity
from megarl.checkpoint.save.resume_point import ResumePoint, on_every_rank, on_first_rank
from megarl.checkpoint.save.training_state import layout_record, load_trainer_state, sharded_state, trainer_numbers
from megarl.checkpoint.save.writer import BackgroundWrite, Written
from megarl.common.clocks import GRACE_S
from megarl.common.trust.object_collectives import JSON, TEXT, Codec, broadcast, codec_of
from megarl.common.trust.run_secret import run_secret
from megarl.config.loading.load import to_yaml
from megarl.config.schema import Config
from megarl.models.hf.export import copy_side_files
from megarl.models.hf.model_files import COMMON_FILE, FORMAT_FILE, HF_FILES, SHARD_INDEX, hf_files
from megarl.telemetry.trace import events
from megarl.trainer.policy import Policy
from megarl.weights.group.store import SyncStore, open_shared_store, store_address

logger = logging.getLogger(__name__)

FORMAT = 1
# For manifest, rename and retention, after every rank must have written. Peers wait twice as long.
FINISH_S = GRACE_S / 2
JOIN_S = 1.0  # for a thread that has reported to end

# What rank 0 sends to the other ranks.
_OUTCOME: Codec[tuple[str | None, str] | None] = codec_of(tuple[str | None, str] | None)
_NOTHING: Codec[None] = codec_of(None)
_FLAG: Codec[bool] = codec_of(bool)

# `checkpoint.every: auto`: the share of time for which saves may block the loop, and the assumed time of the first
# save, so that a trial of a few minutes only saves its last step.
SAVE_SHARE = 0.02
FIRST_SAVE_S = 6.0


def is_affordable(since_s: float, save_s: float) -> bool:
    """Return whether a save of `save_s` seconds is due under `auto`, `since_s` after the last one began."""
    return save_s <= SAVE_SHARE * since_s


@dataclass
class _RunningSave:
    """A save in progress. Only rank 0 has a `finisher`, and sets `outcome`: (path, "") or (None, error)."""

    step: int
    write: BackgroundWrite
    record: dict[str, Any]
    key: str
    deadline: float
    finisher: threading.Thread | None = None
    outcome: tuple[str | None, str] = (None, "")


@dataclass(frozen=True)
class _Copy:
    """The state after `step` steps in host memory, and what its save needs. `started`: `time.monotonic`."""

    step: int
    write: BackgroundWrite
    store: SyncStore
    started: float


class Checkpointer:
    """Saves and restores the trainer's state of one run."""

    def __init__(self, config: Config, policy: Policy, group: ProcessGroup, notify: Callable[[str], None]) -> None:
        """`group`: a gloo group for small objects; `notify`: takes a line for the user (a no-op except on rank 0)."""
        self.config, self.policy = config, policy
        self.settings = config.checkpoint
        self.directory = CheckpointDirectory(config.checkpoint_dir)
        self._notes: list[str] = []  # from rank 0's threads, reported at the next step boundary
        self._retention = CheckpointRetention(self.directory, self.settings, self._notes.append)
        self.newest: int | None = None
        self.failure: str | None = None  # why the last save failed; None if it succeeded. Equal on every rank
        self.failed_saves = 0
        self._group, self._notify = group, notify
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._settings = config.model_dump(mode="json")
        self.resume_point = ResumePoint(config.run_dir, self._settings, self.directory, group, notify)
        self._pending: _RunningSave | None = None
        self._copied: _Copy | None = None
        self._saves = 0
        self._saved_at, self._save_s = time.monotonic(), FIRST_SAVE_S  # the last save's start, and its blocking time
        evaluations = config.evaluation.every if self.settings.keep_best else 0
        self._needed_every = (self.settings.keep_every, evaluations)
        self._threads: list[threading.Thread] = []  # of this rank's saves, including those that timed out
        self._store: SyncStore | None = None

    def due(self, steps_done: int) -> bool:
        """Return whether to save: by `checkpoint.every`, and after the last step. Equal on every rank."""
        every = self.settings.every
        if not every or steps_done == self.config.run.steps:
            return bool(every)
        if every != "auto":
            return steps_done % every == 0
        if any(each and steps_done % each == 0 for each in self._needed_every):
            return True
        return broadcast(is_affordable(time.monotonic() - self._saved_at, self._save_s), _FLAG, 0, self._group)

    def save(self, step: int, record: dict[str, Any] | None, *, wait: bool = False) -> bool:
        """Checkpoint the state after `step` steps. `record` (on rank 0): JSON of the state outside the trainer.

        Returns once the state is copied; writing continues in the background. With `wait` (or
        `checkpoint.asynchronous: false`) it returns once the checkpoint is complete. A failure is reported; returns
        False.
        """
        self._saved_at = time.monotonic()
        saved = self._save(step, record, wait=wait)
        held_s = time.monotonic() - self._saved_at
        self._save_s = held_s if saved else max(held_s, self._save_s)  # failures are quick; do not retry each step
        return saved

    def copy(self, step: int) -> None:
        """Copy the state after `step` steps for the following save, before something else takes its memory.

        A failure is reported, and the save is left out.
        """
        self._copied = self._copy(step)

    def has_copy(self, step: int) -> bool:
        """Return whether the state after `step` steps is copied but not saved yet."""
        return self._copied is not None and self._copied.step == step

    def _save(self, step: int, record: dict[str, Any] | None, *, wait: bool) -> bool:
        copied = self._copied if self.has_copy(step) else self._copy(step)
        self._copied = None
        if copied is None:
            return self.failure is None
        write, store = copied.write, copied.store
        content = {**self._own_record(step), **(record or {})}
        deadline = copied.started + self.config.timeouts.save_s
        pending = _RunningSave(step, write, content, f"save/{self._saves}", deadline)
        self._threads.append(write.start(lambda written: store.put(f"{pending.key}/{self._rank}", written.to_text())))
        if self._rank == 0:
            pending.finisher = threading.Thread(
                target=self._finish, args=(pending, store), name="checkpoint-finisher", daemon=True
            )
            pending.finisher.start()
            self._threads.append(pending.finisher)
        self._pending = pending
        return self.poll(wait=wait or not self.settings.asynchronous)

    def _copy(self, step: int) -> _Copy | None:
        """Return a copy of the state; None if the step is saved already, or if copying failed (sets `failure`)."""
        self.poll(wait=True)  # only one save is written at a time
        if step == self.newest:
            self.failure = None
            return None
        self.policy.memory.require()
        started = time.monotonic()
        if self._still_writing():
            self._failed(step, "a rank is still writing an earlier one, which took too long; its disk may hang")
            return None
        store, error = self._open_store()
        if store is None:
            self._failed(step, error)
            return None
        partial, error = on_first_rank(lambda: str(self._begin(step)), TEXT, self._rank, self._group)
        if partial is None:
            self._failed(step, error)
            return None
        write = BackgroundWrite(sharded_state(self.policy), Path(partial), validate=not self._saves)
        self._saves += 1
        return _Copy(step, write, store, started)

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of an evaluation to the checkpoint of `step`, if it is the newest. Only rank 0 acts.

        `checkpoint.keep_best` then compares the checkpoint with the others.
        """
        if self._rank == 0 and metrics and step == self.newest:
            self._retention.evaluated(step, metrics)
            self._report_notes()

    def _still_writing(self) -> bool:
        """Return whether a thread of a timed-out save still writes, on any rank. A save would sweep its directory."""
        for thread in self._threads:  # threads may end shortly after they reported
            thread.join(timeout=JOIN_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        flag = torch.tensor([len(self._threads)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def _begin(self, step: int) -> Path:
        assert self._identity  # computed here, where an error is raised on every rank
        return self.directory.create_partial(step)

    def poll(self, *, wait: bool = False) -> bool:
        """Check whether the save in progress is complete; with `wait`, wait for it. Returns False if it failed."""
        pending = self._pending
        if pending is None:
            return True
        alive = False
        if pending.finisher is not None:
            if wait:
                pending.finisher.join(max(0.0, pending.deadline - time.monotonic()) + FINISH_S)
            alive = pending.finisher.is_alive()
            if alive and wait:
                pending.outcome = (None, f"its files are written, but completing it took more than {FINISH_S:.0f} s")
        own = None if alive and not wait else pending.outcome
        outcome = broadcast(own, _OUTCOME, 0, self._group)
        if outcome is None:
            return True
        self._pending = None
        self._report_notes()
        path, error = outcome
        if path is None:
            self._failed(pending.step, error)
            return False
        if self.failure is not None and self._rank == 0:
            events.recovery("checkpoint", f"the checkpoint of step {pending.step} is saved", step=pending.step)
        self.newest, self.failure = pending.step, None
        return True

    def _finish(self, pending: _RunningSave, store: SyncStore) -> None:
        """Complete the checkpoint after every rank has written, in a thread of rank 0. Errors become the outcome."""
        started, path, problem = time.monotonic(), "", ""
        try:
            everyone = []
            for rank in range(self._world):
                patience = max(0.0, pending.deadline - time.monotonic())
                key = f"{pending.key}/{rank}"
                text = store.wait(key, patience, f"trainer rank {rank} to write its shards")
                everyone.append(Written.from_text(text))
                store.drop(key)
            errors = [f"rank {rank}: {written.error}" for rank, written in enumerate(everyone) if written.error]
            if errors:
                raise OSError("; ".join(errors))
            path = self._complete(pending, everyone)
            pending.outcome = (path, "")
            logger.info("%s: %.1f s in the background", pending.outcome[0], time.monotonic() - started)
        except Exception as error:
            logger.exception("completing the checkpoint of step %d", pending.step)
            problem = str(error) or repr(error)
            pending.outcome = (None, problem)
        end = {"path": path} if path else {"error": problem[: events.MAX_CHARACTERS]}
        events.record("checkpoint", started, time.monotonic(), step=pending.step, args=end)

    def _open_store(self) -> tuple[SyncStore | None, str]:
        """Return (the store in which writing threads report to rank 0, "") or (None, error) on every rank.

        The first save opens it; rank 0 serves it.
        """

        def prepare() -> tuple[bytes, str | None]:
            return run_secret(self.config.run_dir), store_address(self.config.ray) if self._rank == 0 else None

        def share(text: str | None) -> str:
            return broadcast(text, TEXT, 0, self._group)

        error = ""
        if self._store is None:
            prepared, error = on_every_rank(prepare, self._rank, self._group)
            if prepared is not None:
                secret, host = prepared
                self._store, error = on_every_rank(
                    lambda: open_shared_store("checkpoint", secret, host, share), self._rank, self._group
                )
        return self._store, error

    def restore(self, prepare: Callable[[Candidate], None]) -> dict[str, Any] | None:
        """Load the checkpoint that `checkpoint.resume` selects. Return its record, or None for a new run.

        `prepare` runs on rank 0 after the candidate is chosen and checked.

        Raises:
            ResumeError: on every rank, if the path has no checkpoint, all checkpoints are damaged, or the config
                contradicts the checkpoint.
        """
        chosen = self.resume_point.find()
        if chosen is None:
            on_first_rank(self.resume_point.begin_new_history, _NOTHING, self._rank, self._group)
            return None
        record, error = on_first_rank(
            lambda: self.resume_point.resume_from(chosen, self._identity, prepare), JSON, self._rank, self._group
        )
        if record is None:
            raise ResumeError(error)
        same_layout = record["layout"] == layout_record(self.policy.layout)
        # Checkpoints of b761bc2e have the number of mini-batches in their config only.
        numbers = {"mini_batches": record["config"]["trainer"]["mini_batches"], **record["trainer"]}
        load_trainer_state(self.policy, chosen.path, numbers, with_rng=same_layout)
        if not same_layout:
            self._notify("the layout differs from the checkpoint's: random states start from run.seed")
        self.newest = chosen.step if chosen.own else None
        return record

    def _report_notes(self) -> None:
        notes, self._notes[:] = list(self._notes), []
        for note in notes:
            self._notify(note)

    def _own_record(self, step: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step,
            "trainer": trainer_numbers(self.policy),
            "layout": layout_record(self.policy.layout),
            "identity": self._identity if self._rank == 0 else None,  # only rank 0's record is written
            "config": self._settings,
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identity(self.config, self.policy.info)

    def _complete(self, pending: _RunningSave, everyone: list[Written]) -> str:
        """Write small files and manifest, rename, apply retention. Runs in a thread of rank 0."""
        partial = pending.write.directory
        pending.write.finish([written.items for written in everyone])
        self._write_small_files(partial, pending)
        files = {name: entry for written in everyone for name, entry in written.files.items()}
        small = (path for path in partial.rglob("*") if path.is_file())
        names = {str(path.relative_to(partial)) for path in small} - files.keys()
        files |= {name: FileEntry.of(partial / name) for name in sorted(names)}
        Manifest(pending.step, files).write(partial)
        path = self.directory.complete(pending.step)
        self._retention.apply(pending.step)
        return str(path)

    def _write_small_files(self, partial: Path, pending: _RunningSave) -> None:
        torch.save({"iteration": pending.step, "content_metadata": content_metadata()}, partial / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        self._copy_hf_files(partial / HF_FILES)
        (partial / STATE_FILE).write_text(json.dumps(pending.record, indent=1) + "\n")
        (partial / CONFIG_FILE).write_text(to_yaml(self.config))
        small = [partial / name for name in (COMMON_FILE, FORMAT_FILE, SHARD_INDEX, STATE_FILE, CONFIG_FILE)]
        side_files = [partial / HF_FILES, *(partial / HF_FILES).rglob("*")]
        for path in (*small, *side_files):
            fsync(path)

    def _copy_hf_files(self, target: Path) -> None:
        """Copy config and tokenizer, so that the checkpoint alone suffices for `model.path` and the converter."""
        target.mkdir()
        dtype = torch.bfloat16 if self.config.trainer.precision == "bf16" else torch.float32
        copy_side_files(hf_files(self.config.model.path), target, dtype)

    def _failed(self, step: int, error: str) -> None:
        kept = "none" if self.newest is None else f"step {self.newest}"
        self.failed_saves += 1
        self.failure = f"the checkpoint of step {step} could not be saved: {error}; newest checkpoint: {kept}"
        logger.error("saving step %d failed: %s", step, error)
        if self._rank == 0:
            events.fault("checkpoint", self.failure, step=step)
        self._notify(
            f"the checkpoint of step {step} could NOT be saved: {error}; newest checkpoint: {kept}; the next save, if "
            "one is due, tries again"
        )
