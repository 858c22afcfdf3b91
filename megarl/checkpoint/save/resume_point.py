"""Finds where a run resumes: the newest intact checkpoint, or the requested one.

`resume.py` has the pure rules; this module applies them to files and ranks.
"""

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from megarl.checkpoint.format.manifest import Manifest, check_files
from megarl.checkpoint.save.directory import STATE_FILE, CheckpointDirectory
from megarl.checkpoint.save.resume import (
    Candidate,
    ResumeError,
    candidates,
    changed_order,
    changes,
    choose,
    contradictions,
    refusal,
)
from megarl.common.files import write_json
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE
from megarl.common.trust.object_collectives import TEXT, Codec, all_gather, broadcast, codec_of, sendable
from megarl.config.schema import Config

logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_OF_A_CHANGE = 160  # characters shown of each changed key

_RESULT: Codec[tuple[bytes | None, str]] = codec_of(tuple[bytes | None, str])


def on_every_rank(function: Callable[[], T], rank: int, group: ProcessGroup) -> tuple[T | None, str]:
    """Run `function` on every rank. Return (its result, "") on each, or (None, errors) if it failed on one.

    Collective over the ranks of `group`; `rank` is this one.
    """
    result: T | None = None
    problem = ""
    try:
        result = function()
    except Exception as error:
        logger.exception("rank %d", rank)
        problem = sendable(f"rank {rank}: {error or repr(error)}")
    problems = [each for each in all_gather(problem, TEXT, group) if each]
    return (None, "; ".join(problems)) if problems else (result, "")


def on_first_rank(function: Callable[[], T], codec: Codec[Any], rank: int, group: ProcessGroup) -> tuple[T | None, str]:
    """Run `function` on rank 0. Return (its result, "") or (None, error) on every rank: none is left waiting.

    Collective over the ranks of `group`; `rank` is this one.
    """
    result, problem = None, ""
    if rank == 0:
        try:
            result = codec.encode(function())
        except Exception as error:
            logger.exception("rank 0")
            problem = sendable(str(error) or repr(error))
    content, problem = broadcast((result, problem), _RESULT, 0, group)
    return None if content is None else codec.decode(content), problem


# `checkpoint.resume: never`, or a path, applies only to the first start of a launch.
#
# torchrun restarts failed ranks, and SLURM restarts a requeued job, with the same command. Once the launch has written
# a checkpoint, a restart resumes from that.

FILE = "launched_by.json"


def remember_launch(run_dir: Path) -> None:
    """Record that this launch owns the history in `run_dir`. Called on rank 0 after applying `checkpoint.resume`."""
    write_json(run_dir / FILE, _launch(os.environ))


def config_of_this_start(config: Config) -> Config:
    """Return `config`, with `checkpoint.resume: auto` if this launch has already written a checkpoint."""
    if config.checkpoint.resume == "auto" or not CheckpointDirectory(config.checkpoint_dir).steps():
        return config
    try:
        before = json.loads((config.run_dir / FILE).read_text())
    except (OSError, ValueError):
        return config
    if not same_launch(before, _launch(os.environ), requeued=os.environ.get("SLURM_RESTART_COUNT", "0") != "0"):
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def same_launch(before: Mapping[str, Any], present: Mapping[str, Any], *, requeued: bool) -> bool:
    """Return whether two starts belong to one launch: of a launch script, a requeued job or a torchrun agent."""
    if present["launch"] is None:
        return before["launch"] is None and bool(before["agent"] == present["agent"])
    return bool(before["launch"] == present["launch"] or (requeued and before["job"] == present["job"] is not None))


def _launch(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts that identify the launch of this process, as JSON."""
    agent = ProcessId.of(os.getppid())
    return {
        "launch": environment.get(LAUNCH_ID_VARIABLE),
        "job": environment.get("SLURM_JOB_ID"),
        "agent": [socket.gethostname(), agent.pid, agent.start_time],
    }


_TEXTS: Codec[list[str]] = codec_of(list[str])
_CANDIDATES: Codec[list[Candidate]] = codec_of(list[Candidate])


class ResumePoint:
    """Finds the checkpoint that `checkpoint.resume` selects. Collective unless a method says otherwise."""

    def __init__(
        self,
        run_dir: Path,
        settings: dict[str, Any],
        directory: CheckpointDirectory,
        group: ProcessGroup,
        notify: Callable[[str], None],
    ) -> None:
        """`settings`: the run's config as JSON, to compare with a checkpoint's.

        `group`: a gloo group of all ranks; `notify`: takes a line for the user (a no-op except on rank 0).
        """
        self._run_dir, self._settings = run_dir, settings
        self._directory, self._group, self._notify = directory, group, notify
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def find(self) -> Candidate | None:
        """Choose the same candidate on every rank; None for a new run. Each rank verifies a share of the files.

        Raises ResumeError, on every rank, for a path without a checkpoint, or if all checkpoints are damaged.
        """
        resume = self._settings["checkpoint"]["resume"]
        found, error = on_first_rank(lambda: candidates(self._directory, resume), _CANDIDATES, self._rank, self._group)
        if found is None:
            raise ResumeError(error)
        return choose(found, self.verify, self._on_damaged)

    def verify(self, path: Path) -> list[str]:
        """Return the problems of a checkpoint's files, equal on every rank."""
        try:
            manifest = Manifest.read(path)
            mine = manifest.share(self._rank, self._world)
            problems = check_files(path, manifest.files, mine)
        except ValueError as error:
            problems = [str(error)]
        everyone = all_gather(problems, _TEXTS, self._group)
        return list(dict.fromkeys(problem for part in everyone for problem in part))

    def _on_damaged(self, candidate: Candidate, problems: list[str]) -> None:
        """Report a damaged checkpoint, and rename it if it is this run's."""

        def set_aside() -> str:
            where = self._directory.set_aside(candidate.step, "damaged") if candidate.own else candidate.path
            return f"checkpoint {candidate.path} is damaged and not used: {problems[0]} (directory: {where.name})"

        text, error = on_first_rank(set_aside, TEXT, self._rank, self._group)
        self._notify(text or error)

    def resume_from(
        self, chosen: Candidate, identity: dict[str, Any], prepare: Callable[[Candidate], None]
    ) -> dict[str, Any]:
        """Check that the run may resume from `chosen`, set other histories aside, return the record. On rank 0.

        `identity`: this run's (`resume.py`). `prepare` is called with `chosen` once it is accepted. Raises ResumeError
        if the run contradicts the checkpoint.
        """
        record: dict[str, Any] = json.loads((chosen.path / STATE_FILE).read_text())
        problems = contradictions(record["identity"], identity) + changed_order(record["config"], self._settings)
        if problems:
            raise ResumeError(refusal(chosen.path, problems))
        if chosen.own:
            # Before other files are rolled back: after a kill in between, the next start chooses the same checkpoint.
            self._set_aside_from(chosen.step + 1, "rolled_back")
            self._directory.write_tracker(chosen.step)
        else:
            self._set_aside_from(0, "replaced")
        prepare(chosen)
        remember_launch(self._run_dir)
        self._notify(f"resuming from {chosen.path}, {chosen.step} steps done")
        if changed := changes(record["config"], self._settings):
            self._notify(f"the config differs from the checkpoint's: {'; '.join(map(_shortened, changed))}")
        return record

    def begin_new_history(self) -> None:
        """Set all checkpoints aside, for a run that starts from the beginning. On rank 0."""
        self._set_aside_from(0, "replaced")
        remember_launch(self._run_dir)

    def _set_aside_from(self, first: int, why: str) -> None:
        """Rename the checkpoints from step `first` on: `checkpoint.resume: auto` must not find another history."""
        for step in self._directory.steps():
            if step >= first:
                self._directory.set_aside(step, why)


def _shortened(change: str) -> str:
    """Return a config change cut to its first characters: an added set has all its defaults."""
    return change if len(change) <= MOST_OF_A_CHANGE else f"{change[:MOST_OF_A_CHANGE]}..."
