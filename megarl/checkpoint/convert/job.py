"""Runs a conversion from plan to summary: checks, disk space, units over workers and ranks, commit."""

import gc
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from megarl.checkpoint.convert.ranks import Ranks
from megarl.checkpoint.convert.target import Output, from_os_error
from megarl.checkpoint.convert.workers import ReportBytes, run_units
from megarl.common.errors import ConversionError
from megarl.common.process.memory_tuning import collections_paused
from megarl.common.values import MIB
from megarl.telemetry.metrics.progress import duration

_LIVE_S, _PLAIN_S = 0.2, 10.0  # between updates of the live line on a terminal, and of plain lines elsewhere


def size(count: float) -> str:
    """Format a number of bytes, e.g. as 1.50 GB (powers of ten)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f} B"


class ByteProgress:
    """Reports how many bytes of `total` are done, with speed and remaining time; `start` bytes were done before."""

    def __init__(self, stream: TextIO, title: str, total: int, start: int = 0) -> None:
        self._stream, self._title, self._total = stream, title, total
        self._done = self._start = start
        self._began = self._written = time.monotonic()
        self._tty = stream.isatty()

    def add(self, count: int) -> None:
        """Count `count` more bytes as done."""
        self._done += count
        now = time.monotonic()
        if now - self._written >= (_LIVE_S if self._tty else _PLAIN_S):
            self._written = now
            self._stream.write(f"\r\x1b[2K{self._line(now)}" if self._tty else f"{self._line(now)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Remove the live line."""
        if self._tty:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        speed = (self._done - self._start) / max(now - self._began, 1e-3)
        left = duration((self._total - self._done) / speed) if speed else "-"
        share = 100 * self._done / self._total if self._total else 100
        return f"{self._title}: {size(self._done)} of {size(self._total)} ({share:.0f}%), {size(speed)}/s, {left} left"


RESERVE = 64 * MIB  # bytes for index, configs, tokenizer, file system overhead
R = TypeVar("R")  # the result of a unit, a JSON value


class Job(Protocol[R]):
    """What differs between import and export: the units of a conversion, and how they are written."""

    kind: str
    tensors: int
    sizes: list[int]  # bytes of each unit

    def plan(self) -> dict[str, object]:
        """Return, as JSON, what a resumed conversion must have in common with the interrupted one."""

    def prepare(self, partial: Path) -> None:
        """Create the directories for the units, below the partial result."""

    def write_unit(self, partial: Path, number: int, report: ReportBytes) -> R:
        """Write and fsync one unit; return what `finish` needs of it. Raises ConversionError if the disk fails."""

    def finish(self, partial: Path, results: dict[int, R]) -> None:
        """Write everything but the units, from their results by number, which completes the conversion."""

    def summary(self) -> str:
        """Return one sentence about what was written, and what was left out."""


@dataclass(frozen=True)
class Options:
    """The options of a conversion; see the help texts of the command line."""

    workers: int = 1
    force: bool = False
    resume: bool = False
    dry_run: bool = False


def convert(make: Callable[[Ranks], Job[R]], source: Path, out: Path, options: Options, stream: TextIO) -> None:
    """Make the job and run it. Raises ConversionError or ValueError with one message for any failure."""
    output = Output(out)
    output.refuse_overlap(source)
    try:
        _convert(make, output, options, Ranks(), stream)
    finally:
        output.release()
        gc.unfreeze()


def _convert(make: Callable[[Ranks], Job[R]], output: Output, options: Options, ranks: Ranks, stream: TextIO) -> None:
    began = time.monotonic()

    def check() -> Job[R]:
        if ranks.rank == 0:
            output.refuse_existing(force=options.force, resume=options.resume)
        job = make(ranks)
        if ranks.rank == 0:
            _check_target(job, output)
        return job

    # Plans and indices are several hundred thousand small objects that live until the end. Collections would take two
    # thirds of the time of making them (18,867 tensors: 1.4 of 2.1 s), and later make each worker copy their pages.
    with collections_paused(freeze=True):
        job = ranks.stage("check", check)
    if options.dry_run:
        if ranks.rank == 0:
            _describe(job, output, options, ranks, stream)
        return
    if not ranks.first("begin", lambda: _begin(job, output, options)):
        if ranks.rank == 0:
            output.clean()
            stream.write(f"{output.out} is complete already\n")
        return
    done = ranks.stage("read progress", output.finished)
    ranks.stage("write", lambda: _write(job, output, options, ranks, done, stream))
    with collections_paused(freeze=True):
        ranks.stage("finish", lambda: _finish(job, output) if ranks.rank == 0 else None)
    if ranks.rank == 0:
        _summarise(job, output, done, time.monotonic() - began, stream)


def _begin(job: Job[R], output: Output, options: Options) -> bool:
    try:
        output.lock()
        unfinished = True
        if options.resume:
            unfinished = output.resume(job.plan())
        else:
            output.begin(job.plan(), force=options.force)
        if unfinished:
            job.prepare(output.partial)
        return unfinished
    except OSError as error:
        raise from_os_error(error, f"preparing {output.work}") from error


def _write(job: Job[R], output: Output, options: Options, ranks: Ranks, done: Mapping[int, R], stream: TextIO) -> None:
    units = ranks.share(range(len(job.sizes)))
    left = [number for number in units if number not in done]
    total = sum(job.sizes[number] for number in units)
    title = job.kind if ranks.size == 1 else f"{job.kind}, rank {ranks.rank} of {ranks.size}"
    progress = ByteProgress(stream, title, total, total - sum(job.sizes[number] for number in left))

    def work(number: int, report: ReportBytes) -> None:
        result = job.write_unit(output.partial, number, report)
        output.finish_unit(number, result)

    try:
        run_units(left, work, options.workers, progress.add if ranks.rank == 0 else lambda _: None)
    finally:
        progress.close()


def _finish(job: Job[R], output: Output) -> None:
    results = output.finished()
    missing = sorted(set(range(len(job.sizes))) - set(results))
    if missing:
        raise ConversionError(f"units {missing[:5]} left no result in {output.work}; continue with --resume")
    try:
        job.finish(output.partial, {number: results[number] for number in range(len(job.sizes))})
        output.commit()
    except OSError as error:
        raise from_os_error(error, f"completing {output.out}") from error


def needed_bytes(job: Job[R]) -> int:
    """Return the bytes of disk space that the whole output needs."""
    return sum(job.sizes) + RESERVE


def _check_target(job: Job[R], output: Output) -> None:
    """Check that the output can be created and fits on the disk, before anything is written.

    Bytes of an unfinished conversion count as free. Raises ConversionError.
    """
    parent = next(path for path in output.out.parents if path.exists())
    if not parent.is_dir():
        raise ConversionError(f"{output.out} cannot be created: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConversionError(f"{output.out} cannot be created: {parent} is not writable")
    there = sum(path.stat().st_blocks * 512 for path in output.work.rglob("*") if path.is_file())
    free, needed = shutil.disk_usage(parent).free + there, needed_bytes(job)
    if free < needed:
        raise ConversionError(
            f"{output.out} needs {size(needed)}, but {parent} has {size(free)} free; free some space first"
        )


def _describe(job: Job[R], output: Output, options: Options, ranks: Ranks, stream: TextIO) -> None:
    parent = next(path for path in output.out.parents if path.exists())
    stream.write(
        f"{job.kind} to {output.out}\n"
        f"  {job.summary()}, {size(sum(job.sizes))}\n"
        f"  {len(job.sizes)} units over {ranks.size} rank(s) of {options.workers} worker(s)\n"
        f"  disk: {size(needed_bytes(job))} needed, {size(shutil.disk_usage(parent).free)} free in {parent}\n"
        "dry run: nothing was written\n"
    )


def _summarise(job: Job[R], output: Output, done: Mapping[int, R], seconds: float, stream: TextIO) -> None:
    written = sum(count for number, count in enumerate(job.sizes) if number not in done)
    resumed = f", {size(sum(job.sizes) - written)} of it before the resume" if done else ""
    stream.write(
        f"{output.out}: {job.summary()}, {size(sum(job.sizes))}{resumed}, {seconds:.1f} s, "
        f"{written / max(seconds, 1e-3) / 1e9:.2f} GB/s\n"
    )
