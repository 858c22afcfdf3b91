"""Saves and restores a run. Every method is collective over the trainer ranks; only rank 0 writes small files.

A save never ends a run: whatever the disk refuses is said, the last checkpoint stays, and the next save tries again.
Order of a save: shards (in the background) -> `.metadata` -> small files -> manifest -> rename -> retention. A process
killed anywhere before the rename leaves the checkpoint before it the newest one.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from megarl.checkpoint.format import faults
from megarl.checkpoint.format.manifest import FileEntry, Manifest, check_files, fsync_directory
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy
from megarl.checkpoint.format.sharding import content_metadata
from megarl.checkpoint.save.background_export import BackgroundExport
from megarl.checkpoint.save.directory import CONFIG_FILE, STATE_FILE, CheckpointDirectory, best_step, to_delete
from megarl.checkpoint.save.resume import Candidate, ResumeError, candidates, changes, choose, contradictions, identity
from megarl.checkpoint.save.same_launch import remember_launch
from megarl.checkpoint.save.training_state import (
    layout_record,
    load_sharded_state,
    optimizer_views,
    sharded_state,
    trainer_numbers,
)
from megarl.checkpoint.save.writer import BackgroundWrite, Written
from megarl.common.timeouts import GRACE_S
from megarl.config.load import to_yaml
from megarl.config.schema import Config
from megarl.models.export import copy_side_files
from megarl.models.source import HF_FILES, hf_files
from megarl.trainer.policy import Policy
from megarl.weights.sender import own_address
from megarl.weights.transport import SyncStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

COMMON_FILE = "common.pt"  # Megatron-Core's own names
METADATA_FILE = "metadata.json"
TORCH_METADATA = ".metadata"
FORMAT = 1
# Manifest, rename, retention: from the time by which every rank must have written. Peers wait for twice as long.
FINISH_S = GRACE_S / 2


@dataclass
class _RunningSave:
    """A save that is being written. `finisher` and `outcome` (path, error) are rank 0's."""

    step: int
    write: BackgroundWrite
    record: dict[str, Any]
    key: str
    deadline: float
    finisher: threading.Thread | None = None
    outcome: tuple[str | None, str] = (None, "")


class Checkpointer:
    """`group`: a gloo group for small objects; `say`: one line for the user, on rank 0 (elsewhere it does nothing)."""

    def __init__(self, config: Config, policy: Policy, group: Any, say: Callable[[str], None]) -> None:
        self.config, self.policy = config, policy
        self.knobs = config.checkpoint
        self.directory = CheckpointDirectory(config.checkpoint_dir)
        self._notes: list[str] = []  # of rank 0's thread, said at the next step boundary
        self.export = BackgroundExport(config, self.directory, self._notes.append)
        self.newest: int | None = None
        self._group, self._say = group, say
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._pending: _RunningSave | None = None
        self._saves = 0
        self._board: SyncStore | None = None

    def due(self, steps_done: int) -> bool:
        """Every `checkpoint.every` steps, and after the last one."""
        every = self.knobs.every
        return bool(every) and (steps_done % every == 0 or steps_done == self.config.run.steps)

    def save(self, step: int, record: dict[str, Any] | None, *, wait: bool = False) -> bool:
        """Checkpoint the state after `step` steps; `record` (rank 0): what is not the trainer's, JSON.

        Returns when the state is copied and writing goes on in the background; with `wait` (or
        `checkpoint.asynchronous: false`) when it is complete. False if it failed: that has been said.
        """
        self.poll(wait=True)  # one at a time
        if step == self.newest:
            return True
        started = time.monotonic()
        board = self._board = self._board or self._open_board()
        partial, error = self._first_rank(lambda: self._begin(step))
        if partial is None:
            self._failed(step, error)
            return False
        write = BackgroundWrite(sharded_state(self.policy), partial, validate=not self._saves)
        self._saves += 1
        content = {**self._own_record(step), **(record or {})}
        pending = _RunningSave(step, write, content, f"save/{self._saves}", started + self.config.timeouts.save_s)
        write.start(lambda written: board.put(f"{pending.key}/{self._rank}", _pack(written)))
        if self._rank == 0:
            pending.finisher = threading.Thread(
                target=self._finish, args=(pending, board), name="checkpoint-finisher", daemon=True
            )
            pending.finisher.start()
        self._pending = pending
        return self.poll(wait=wait or not self.knobs.asynchronous)

    def _begin(self, step: int) -> Path:
        assert self._identity  # made here, where an error is every rank's
        return self.directory.begin(step)

    def poll(self, *, wait: bool = False) -> bool:
        """Learn whether the running save is complete; with `wait`, wait until it is. False if it failed."""
        pending = self._pending
        if pending is None:
            return True
        alive = False
        if pending.finisher is not None:
            if wait:
                pending.finisher.join(max(0.0, pending.deadline - time.monotonic()) + FINISH_S)
            alive = pending.finisher.is_alive()
            if alive and wait:
                pending.outcome = (None, f"its files are there, but completing it has not ended for {FINISH_S:.0f} s")
        outcome: list[Any] = [None if alive and not wait else pending.outcome]
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is None:
            return True
        self._pending = None
        self._say_notes()
        path, error = outcome[0]
        if path is None:
            self._failed(pending.step, error)
            return False
        self.newest = pending.step
        return True

    def _finish(self, pending: _RunningSave, board: SyncStore) -> None:
        """Rank 0's thread: once every rank has written, complete the checkpoint. What goes wrong is the outcome."""
        started = time.monotonic()
        try:
            everyone = []
            for rank in range(self._world):
                patience = max(0.0, pending.deadline - time.monotonic())
                key = f"{pending.key}/{rank}"
                everyone.append(_unpack(board.wait(key, patience, f"trainer rank {rank} to write its shards")))
                board.drop(key)
            errors = [f"rank {rank}: {written.error}" for rank, written in enumerate(everyone) if written.error]
            if errors:
                raise OSError("; ".join(errors))
            pending.outcome = (self._complete(pending, everyone), "")
            logger.info("%s: %.1f s in the background", pending.outcome[0], time.monotonic() - started)
        except Exception as error:
            logger.exception("completing the checkpoint of step %d", pending.step)
            pending.outcome = (None, str(error) or repr(error))

    def _open_board(self) -> SyncStore:
        """Where the writers' threads report to rank 0's."""
        if self._rank == 0:
            board = SyncStore(own_address(), 0, server=True)
        place: list[Any] = [[board.host, board.port] if self._rank == 0 else None]
        torch.distributed.broadcast_object_list(place, src=0, group=self._group)
        return board if self._rank == 0 else SyncStore(*place[0])

    def restore(self, prepare: Callable[[Candidate], None]) -> dict[str, Any] | None:
        """Load what `checkpoint.resume` asks for; its record, or None for a new run.

        `prepare` runs on rank 0 once the candidate is chosen and may be resumed. Raises ResumeError on every rank: a
        path without a checkpoint, all of them damaged, or a config that contradicts the checkpoint.
        """
        chosen = self._choose()
        if chosen is None:
            self._first_rank(self._begin_anew)
            return None
        record, error = self._first_rank(lambda: self._accept(chosen, prepare))
        if record is None:
            raise ResumeError(error)
        same_layout = record["layout"] == layout_record(self.policy.layout)
        load_trainer_state(self.policy, chosen.path, record["trainer"], with_rng=same_layout)
        if not same_layout:
            self._say("another layout than the checkpoint's: random states start anew from run.seed")
        self.newest = chosen.step if chosen.own else None
        return record

    def finish(self, export_s: float) -> None:
        """Complete what is running; an export that takes longer than `export_s` is ended."""
        self.poll(wait=True)
        if self._rank == 0:
            self.export.wait(export_s)
            self._say_notes()

    def _say_notes(self) -> None:
        notes, self._notes[:] = list(self._notes), []
        for note in notes:
            self._say(note)

    def _own_record(self, step: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step,
            "trainer": trainer_numbers(self.policy),
            "layout": layout_record(self.policy.layout),
            "identity": self._identity if self._rank == 0 else None,  # whose record is written
            "config": self.config.model_dump(mode="json"),
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return identity(self.config, self.policy.info)

    def _complete(self, pending: _RunningSave, everyone: list[Written]) -> str:
        """Rank 0's thread: small files, manifest, rename, retention, export."""
        partial = pending.write.directory
        pending.write.finish([written.results for written in everyone])
        self._write_small_files(partial, pending)
        files = {name: entry for written in everyone for name, entry in written.files.items()}
        small = (path for path in partial.rglob("*") if path.is_file())
        names = {str(path.relative_to(partial)) for path in small} - files.keys()
        files |= {name: FileEntry.of(partial / name) for name in sorted(names)}
        faults.reached("manifest")
        Manifest(pending.step, files).write(partial)
        path = self.directory.complete(pending.step)
        if self.knobs.hf_export_every and pending.step % self.knobs.hf_export_every == 0:
            self.export.start(pending.step)
        self._retain(pending.step)
        return str(path)

    def _write_small_files(self, partial: Path, pending: _RunningSave) -> None:
        torch.save({"iteration": pending.step, "content_metadata": content_metadata()}, partial / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        self._copy_hf_files(partial / HF_FILES)
        (partial / STATE_FILE).write_text(json.dumps(pending.record, indent=1) + "\n")
        (partial / CONFIG_FILE).write_text(to_yaml(self.config))
        small = [partial / name for name in (COMMON_FILE, METADATA_FILE, TORCH_METADATA, STATE_FILE, CONFIG_FILE)]
        for path in (*small, *(partial / HF_FILES).iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(partial / HF_FILES)

    def _copy_hf_files(self, target: Path) -> None:
        """Config and tokenizer: with them the checkpoint is whole, for `model.path` and for the converter."""
        target.mkdir()
        dtype = torch.bfloat16 if self.config.trainer.precision == "bf16" else torch.float32
        copy_side_files(hf_files(self.config.model.path), target, dtype)

    def _retain(self, newest: int) -> None:
        """Delete what retention does not keep; a checkpoint that cannot be deleted costs only space."""
        try:
            steps = self.directory.steps()
            values = self._values(steps) if self.knobs.keep_best else {}
            best = best_step(values, self.knobs.keep_best_mode)
            obsolete = to_delete(
                [step for step in steps if step <= newest],
                keep_last=self.knobs.keep_last,
                keep_every=self.knobs.keep_every,
                best=best,
                leased=self.directory.leased(),
            )
            for step in obsolete:
                self.directory.delete(step)
        except (OSError, ValueError, KeyError) as error:
            self._notes.append(f"an old checkpoint could not be deleted: {error}")

    def _values(self, steps: list[int]) -> dict[int, float]:
        """`checkpoint.keep_best` of every checkpoint that was evaluated. One that cannot be read has none."""
        found = {}
        for step in steps:
            try:
                value = self.directory.state(step).get("metrics", {}).get(self.knobs.keep_best)
            except (OSError, ValueError) as error:
                self._notes.append(f"{self.directory.path(step) / STATE_FILE} cannot be read: {error}")
                continue
            if value is not None:
                found[step] = float(value)
        return found

    def _choose(self) -> Candidate | None:
        """The same candidate on every rank; files are verified by all ranks together."""
        found, error = self._first_rank(lambda: candidates(self.directory, self.knobs.resume))
        if found is None:
            raise ResumeError(error)
        return choose(found, self._verify, self._on_damaged)

    def _verify(self, path: Path) -> list[str]:
        try:
            manifest = Manifest.read(path)
            mine = manifest.share(self._rank, self._world)
            problems = check_files(path, manifest.files, mine)
        except ValueError as error:
            problems = [str(error)]
        everyone: list[Any] = [None] * self._world
        torch.distributed.all_gather_object(everyone, problems, group=self._group)
        return list(dict.fromkeys(problem for problems in everyone for problem in problems))

    def _on_damaged(self, candidate: Candidate, problems: list[str]) -> None:
        def set_aside() -> str:
            where = self.directory.set_aside(candidate.step, "damaged") if candidate.own else candidate.path
            return f"checkpoint {candidate.path} is damaged and not used: {problems[0]} (now {where.name})"

        text, error = self._first_rank(set_aside)
        self._say(text or error)

    def _accept(self, chosen: Candidate, prepare: Callable[[Candidate], None]) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((chosen.path / STATE_FILE).read_text())
        problems = contradictions(record["identity"], self._identity)
        if problems:
            raise ResumeError(
                f"{chosen.path} belongs to another run: {'; '.join(problems)}. Resume with the config of that run, or "
                "start anew with checkpoint.resume=never"
            )
        if chosen.own:
            # Before anything else is rolled back: killed in between, the next start chooses the same one.
            self._set_aside_from(chosen.step + 1, "rolled_back")
            self.directory.write_tracker(chosen.step)
        else:
            self._set_aside_from(0, "replaced")
        prepare(chosen)
        remember_launch(self.config.run_dir)
        self._say(f"resuming from {chosen.path}, {chosen.step} steps done")
        if changed := changes(record["config"], self.config.model_dump(mode="json")):
            self._say(f"config changed since then: {'; '.join(changed)}")
        return record

    def _begin_anew(self) -> None:
        self._set_aside_from(0, "replaced")
        remember_launch(self.config.run_dir)

    def _set_aside_from(self, first: int, why: str) -> None:
        """Checkpoints of another history must not be found by the next `auto`."""
        for step in self.directory.steps():
            if step >= first:
                self.directory.set_aside(step, why)

    def _failed(self, step: int, error: str) -> None:
        kept = "none" if self.newest is None else f"step {self.newest}"
        logger.error("saving step %d failed: %s", step, error)
        self._say(
            f"the checkpoint of step {step} could NOT be saved: {error}. Training goes on; newest checkpoint: {kept}; "
            "the next save tries again"
        )

    def _first_rank(self, function: Callable[[], T]) -> tuple[T | None, str]:
        """(result of `function` on rank 0, "") on every rank, or (None, error): no rank is left waiting."""
        outcome: list[Any] = [None, ""]
        if self._rank == 0:
            try:
                outcome[0] = function()
            except (OSError, ValueError) as error:
                logger.exception("rank 0")
                outcome[1] = str(error)
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        return outcome[0], outcome[1]


def _pack(written: Written) -> str:
    """For the board, which carries JSON. Only this run's own ranks reach it."""
    return base64.b64encode(pickle.dumps(written)).decode()


def _unpack(text: str) -> Written:
    written: Written = pickle.loads(base64.b64decode(text))
    return written


def load_trainer_state(policy: Policy, path: Path, numbers: dict[str, Any], *, with_rng: bool) -> None:
    """Weights, optimizer and schedule (and random states) of `policy` from a checkpoint of any layout. Collective."""
    state = sharded_state(policy, with_rng=with_rng)
    parameters = {name: sharded.data for name, sharded in state["model"].items()}
    optimizer = optimizer_views(state)
    strategy: Any = MappedLoadStrategy()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    loaded = dist_checkpointing.load(state, str(path), strategy)
    with torch.no_grad():
        for name, parameter in parameters.items():
            # Loaded in place by one rank, received from a peer by another, halves of a gated layer joined anew.
            if loaded["model"][name].data_ptr() != parameter.data_ptr():
                parameter.copy_(loaded["model"][name])
    load_sharded_state(policy, loaded, numbers, optimizer)
