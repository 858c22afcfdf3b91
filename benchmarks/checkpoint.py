"""Saving and loading a run's trainer state, compared with plain sequential I/O, and the slow-down of updates by a save.

    python -m benchmarks.checkpoint [--json FILE] [--dir DIR] [--rounds N] [--quick]

- save: `Checkpointer.save` until the checkpoint is complete (copy, shards, digests, manifest, rename, all fsynced),
  compared with a plain sequential write of as many bytes with fsync in the same directory.
- load: verification of every digest and the load into model and optimizer, compared with a plain sequential read of the
  same files. Before each of the two the files are dropped from the page cache.
- stall: the slowest update that overlaps an asynchronous save, from the call of `save` on, compared with the same
  update alone. Where it is slowed by more than 10%, the reference is what a bare copy and write cost: each rank clones
  a tensor of as many bytes as its part of the checkpoint has, and a thread writes the clone, alongside the same update.

Two trainer ranks with a distributed optimizer in fp32: weights, master weights and both of Adam's moments. Numbers are
medians of alternating rounds. It takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.random_model import make_model
from benchmarks.lib.ranks import MEASURED, RANKS, join_ranks, ranks_parser, run_ranks
from benchmarks.lib.report import Ratio, finish

if TYPE_CHECKING:
    from megarl.checkpoint.save.checkpointer import Checkpointer
    from megarl.trainer.policy import Policy, TrainSample

CHUNK = 8 * 2**20
DISK_BOUND = 0.5  # of the speed of plain I/O
STALL_BOUND, BARE_BOUND = 0.10, 1.2
RESPONSE = 8
TIMEOUT_S = 3000
KINDS = ("alone", "save", "bare")


def make_policy(directory: Path, step_tokens: int) -> tuple[Policy, list[TrainSample]]:
    """Return the policy of this rank, and its samples of one update of `step_tokens` tokens."""
    from megarl.config.schema import Config
    from megarl.models.hf.read_config import load_info
    from megarl.models.megatron.layout import Layout
    from megarl.trainer import parallel
    from megarl.trainer.policy import Policy, TrainSample

    config = Config.model_validate(
        {
            "run": {"steps": 1000, "dir": directory / "run"},
            "model": {"path": directory / "model"},
            "trainer": {
                "gpus": RANKS, "precision": "fp32", "micro_batch_tokens": 2048, "optimizer": {"lr": 1e-5},
            },
            "batch": {"groups": 2, "samples_per_group": 2},
            "sampling": {"max_tokens": 1024},
            "data": {"path": __file__},
            "checkpoint": {"dir": directory / "checkpoints", "keep_last": 1},
        }
    )  # fmt: skip
    layout = Layout(world_size=RANKS)
    parallel.initialize(layout, seed=0, timeout_s=600)
    policy = Policy(config, layout, load_info(directory / "model"))
    length = step_tokens // 4
    samples = [
        TrainSample(
            f"0:{n}", [1] * (length - RESPONSE), [2 + n] * RESPONSE, streams={"old_logprobs": torch.zeros(RESPONSE)}
        )
        for n in range(parallel.dp_rank(), 4, RANKS)
    ]
    for sample in samples:
        sample.set_advantage(1.0)
    return policy, samples


def drop_cache(paths: list[Path]) -> None:
    """Drop the files from the page cache; they are already on the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_write(path: Path, size: int, block: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def plain_read(paths: list[Path]) -> None:
    buffer = bytearray(CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def timed(function: Callable[..., object], *arguments: object, **options: object) -> float:
    """Return the seconds of one call on all ranks together: they begin and end at a barrier."""
    torch.distributed.barrier()
    started = time.perf_counter()
    function(*arguments, **options)
    torch.distributed.barrier()
    return time.perf_counter() - started


def on_rank_0(function: Callable[..., object], *arguments: object) -> None:
    if torch.distributed.get_rank() == 0:
        function(*arguments)


class BareCopy:
    """A clone of as many bytes as this rank saves, written by a thread: what no save can do without."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._path = directory / f"bare-{torch.distributed.get_rank()}"
        self._source_B = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Clone now, write in the background."""
        clone = self._source_B.clone().numpy().data

        def write() -> None:
            with self._path.open("wb", buffering=0) as file:
                for start in range(0, len(clone), CHUNK):
                    file.write(clone[start : start + CHUNK])
                os.fsync(file.fileno())

        self._thread = threading.Thread(target=write)
        self._thread.start()

    def done(self) -> bool:
        """Return whether every rank has written all of its bytes."""
        assert self._thread is not None
        writing = torch.tensor([int(self._thread.is_alive())])
        torch.distributed.all_reduce(writing)
        return not writing.item()

    def remove(self) -> None:
        assert self._thread is not None
        self._thread.join(TIMEOUT_S)
        self._path.unlink()


class SaveBench:
    """The measurements on one rank; `seconds` holds the times of each kind in the order of the rounds."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        from megarl.checkpoint.save.checkpointer import Checkpointer

        self.policy, self.samples = make_policy(directory, args.step_tokens)
        self.checkpointer: Checkpointer = Checkpointer(
            self.policy.config, self.policy, torch.distributed.new_group(backend="gloo"), print
        )
        self.directory, self.rounds = directory, args.rounds
        self.seconds: dict[str, list[float]] = {}
        self.overlapped: dict[str, list[int]] = {"save": [], "bare": []}
        self.nbytes = 0

    def run(self) -> None:
        """Measure the disk, then the updates; rank 0 writes the results."""
        self.policy.update(self.samples)
        for number in range(self.rounds):
            self._measure_disk(number + 1)
        bare = BareCopy(self.directory, self.nbytes // RANKS)
        self.policy.update(self.samples)
        for number in range(self.rounds):
            for kind in KINDS:
                self._measure_updates(kind, 1000 + number, bare)
        measured = {"seconds": self.seconds, "bytes": self.nbytes, "overlapped": self.overlapped}
        on_rank_0((self.directory / MEASURED).write_text, json.dumps(measured))

    def _add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def _measure_disk(self, step: int) -> None:
        from megarl.checkpoint.format.manifest import Manifest

        self._add("save", timed(self.checkpointer.save, step, {}, wait=True))
        path = self.checkpointer.directory.path(step)
        manifest = Manifest.read(path)
        self.nbytes = manifest.total_bytes
        plain, block = self.directory / "plain", os.urandom(CHUNK)  # random bytes, which no file system can compress
        self._add("write", timed(on_rank_0, plain_write, plain, self.nbytes, block))
        on_rank_0(plain.unlink)
        files = [path / name for name in manifest.files]
        timed(on_rank_0, drop_cache, files)
        self._add("read", timed(on_rank_0, plain_read, files))
        timed(on_rank_0, drop_cache, files)
        self._add("load", timed(self._verify_and_load, path))

    def _verify_and_load(self, path: Path) -> None:
        """Check every digest of a checkpoint and load it, as a resume does."""
        from megarl.checkpoint.save.training_state import load_trainer_state, trainer_numbers

        problems = self.checkpointer.resume_point.verify(path)
        assert not problems, problems
        load_trainer_state(self.policy, path, trainer_numbers(self.policy), with_rng=True)

    def _measure_updates(self, kind: str, step: int, bare: BareCopy) -> None:
        """Time updates until what overlaps them has ended, at least one; the slowest of them counts."""
        slowest, count, over = 0.0, 0, False
        torch.distributed.barrier()
        started = time.perf_counter()
        if kind == "save":
            self.checkpointer.save(step, {})
        elif kind == "bare":
            bare.start()
        while not over:
            self.policy.update(self.samples)
            ended = time.perf_counter()
            slowest, count, started = max(slowest, ended - started), count + 1, ended
            if kind == "save":
                self.checkpointer.poll()
            over = {"alone": lambda: True, "save": lambda: self.checkpointer._pending is None, "bare": bare.done}[
                kind
            ]()
        self._add(f"update {kind}", slowest)
        if kind == "bare":
            bare.remove()
        if kind != "alone":
            self.overlapped[kind].append(count)


def disk_rows(measured: dict[str, Any]) -> list[Ratio]:
    """Return the rows of save and load against plain I/O."""
    seconds = measured["seconds"]
    rows = []
    for name, against in (("save", "write"), ("load", "read")):
        ratio = statistics.median(seconds[against]) / statistics.median(seconds[name])
        details = {"bytes": measured["bytes"], f"{name}_s": seconds[name], f"plain_{against}_s": seconds[against]}
        rows.append(Ratio(f"checkpoint_{name}", ratio, DISK_BOUND, True, details))
    return rows


def stall_row(measured: dict[str, Any]) -> Ratio:
    """Return the slow-down of the update that overlaps a save. The bound is the larger of the two that are allowed."""
    seconds = {kind: statistics.median(measured["seconds"][f"update {kind}"]) for kind in KINDS}
    slowed, bare = (seconds[kind] / seconds["alone"] - 1 for kind in ("save", "bare"))
    details = {
        "update_s": seconds["alone"],
        "update_alongside_save_s": seconds["save"],
        "update_alongside_bare_copy_and_write_s": seconds["bare"],
        "slowed_by_bare_copy_and_write": bare,
        "updates_overlapped": measured["overlapped"],
    }
    return Ratio("checkpoint_stall", slowed, max(STALL_BOUND, BARE_BOUND * bare), details=details)


def main() -> int:
    parser = ranks_parser(__doc__)
    parser.add_argument("--dir", type=Path, help="directory to write to (default: the system's temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=4096, help="tokens of one update")
    args = parser.parse_args()
    if args.rank_of is not None:
        join_ranks()
        SaveBench(args.rank_of, args).run()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return 0
    if args.quick:
        args.rounds, args.step_tokens = 1, 256
    hidden, layers = (64, 2) if args.quick else (512, 8)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="checkpoint-", ignore_cleanup_errors=True) as name:
        make_model(
            Path(name, "model"), vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=layers, num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=2048,
        )  # fmt: skip
        options = {"rounds": args.rounds, "step-tokens": args.step_tokens}
        measured = run_ranks("checkpoint", Path(name), options, TIMEOUT_S)
    return finish([*disk_rows(measured), stall_row(measured)], args)


if __name__ == "__main__":
    sys.exit(main())
