"""Saving and loading a run's trainer state, compared with plain sequential I/O, and the slow-down of steps by a save.

    python benchmarks/checkpoint.py [--json FILE] [--dir DIR] [--rounds N]

- save: `Checkpointer.save` until the checkpoint is complete (copy, shards, digests, manifest, rename, all fsynced),
  compared with a plain sequential write of as many bytes with fsync in the same directory.
- load: verification of every digest and the load into model and optimizer, compared with a plain sequential read of the
  same files. Before each of the two the files are dropped from the page cache.
- stall: the time of updates during which one asynchronous save starts and ends, compared with as many without a save.

One trainer rank in fp32: weights, master weights and both of Adam's moments. Numbers are medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if TYPE_CHECKING:  # megarl's modules are imported after `platforms.activate`
    from megarl.checkpoint.format.manifest import Manifest
    from megarl.checkpoint.save.checkpointer import Checkpointer
    from megarl.trainer.policy import Policy, TrainSample

CHUNK = 8 * 2**20
BOUNDS = {"save": 0.5, "load": 0.5, "stall": 0.10}
RESPONSE = 8


def make_policy(directory: Path, args: argparse.Namespace) -> tuple[Policy, list[TrainSample]]:
    """Make a policy of about `--hidden`^2 x 12 x `--layers` parameters, and the samples of one update."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megarl.config.schema import Config
    from megarl.models.layout import Layout
    from megarl.models.read_config import load_info
    from megarl.trainer import parallel
    from megarl.trainer.policy import Policy, TrainSample

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=4096, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64, head_dim=32,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(directory / "model")
    config = Config.model_validate(
        {
            "run": {"steps": 1000, "dir": directory / "run"},
            "model": {"path": directory / "model"},
            "trainer": {"precision": "fp32", "micro_batch_tokens": 2048, "optimizer": {"lr": 1e-5}},
            "batch": {"groups": 2, "samples_per_group": 2},
            "sampling": {"max_tokens": 1024},
            "data": {"path": __file__},
            "checkpoint": {"dir": directory / "checkpoints", "keep_last": 1},
        }
    )
    layout = Layout(world_size=1)
    parallel.initialize(layout, seed=0, timeout_s=600)
    policy = Policy(config, layout, load_info(directory / "model"))
    length = args.step_tokens // 4
    samples = [
        TrainSample(
            f"0:{n}", [1] * (length - RESPONSE), [2 + n] * RESPONSE, streams={"old_logprobs": torch.zeros(RESPONSE)}
        )
        for n in range(4)
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


def timed(function: Callable[..., object], *arguments: object, **options: object) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - started


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


def verify_and_load(policy: Policy, path: Path, manifest: Manifest) -> None:
    """Check every digest of a checkpoint and load it, as a resume does."""
    from megarl.checkpoint.format.manifest import check_files
    from megarl.checkpoint.save.checkpointer import load_trainer_state
    from megarl.checkpoint.save.training_state import trainer_numbers

    problems = check_files(path, manifest.files, manifest.files)
    assert not problems, problems
    load_trainer_state(policy, path, trainer_numbers(policy), with_rng=True)


def measure_disk(policy: Policy, checkpointer: Checkpointer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure rounds of save, plain write, plain read, verify and load; return the rows of the report."""
    from megarl.checkpoint.format.manifest import Manifest

    block = os.urandom(CHUNK)  # random bytes, which no file system can compress
    seconds: dict[str, list[float]] = {"write": [], "save": [], "read": [], "load": []}
    size = 0
    for number in range(args.rounds):
        step = number + 1
        seconds["save"].append(timed(checkpointer.save, step, {}, wait=True))
        path = checkpointer.directory.path(step)
        manifest = Manifest.read(path)
        size = manifest.total_bytes
        plain = checkpointer.directory.root / "plain"
        seconds["write"].append(timed(plain_write, plain, size, block))
        plain.unlink()
        files = [path / name for name in manifest.files]
        drop_cache(files)
        seconds["read"].append(timed(plain_read, files))
        drop_cache(files)
        seconds["load"].append(timed(verify_and_load, policy, path, manifest))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, against in (("save", "write"), ("load", "read")):
        ratio = median[against] / median[name]
        rows.append(
            {
                "name": f"checkpoint_{name}",
                "ratio": ratio,
                "bound": BOUNDS[name],
                "ok": ratio >= BOUNDS[name],
                "details": {"bytes": size, f"{name}_s": seconds[name], f"plain_{against}_s": seconds[against]},
            }
        )
    return rows


def window(
    policy: Policy, samples: list[TrainSample], checkpointer: Checkpointer, updates: int, save: int | None
) -> list[float]:
    """Return the seconds of each update; the start of a save at step `save` counts as part of the first one."""
    ends = [time.perf_counter()]
    if save is not None:
        checkpointer.save(save, {})
    for _ in range(updates):
        policy.update(samples)
        checkpointer.poll()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(ends)]


def measure_stall(
    policy: Policy, samples: list[TrainSample], checkpointer: Checkpointer, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure alternating windows of `--window` updates, without a save and with one that starts before the first."""
    policy.update(samples)
    windows: dict[bool, list[float]] = {False: [], True: []}
    longest: dict[bool, list[float]] = {False: [], True: []}
    background = []
    for number in range(2 * args.rounds):
        saves = number % 2 == 1
        step = 1000 + number if saves else None
        steps = window(policy, samples, checkpointer, args.window, step)
        windows[saves].append(sum(steps))
        longest[saves].append(max(steps))
        if saves:
            background.append(checkpointer._pending is None)
            checkpointer.poll(wait=True)
    with_save, without = (statistics.median(windows[saves]) for saves in (True, False))
    stall = with_save / without - 1
    return {
        "name": "checkpoint_stall",
        "ratio": stall,
        "bound": BOUNDS["stall"],
        "ok": stall <= BOUNDS["stall"] and all(background),
        "details": {
            "step_s": without / args.window,
            "steps": args.window,
            "save_ended_inside": background,
            "longest_step_s": {"without": statistics.median(longest[False]), "with": statistics.median(longest[True])},
            "without_s": windows[False],
            "with_s": windows[True],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="directory to write to (default: the system's temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=1024, help="tokens of one update")
    parser.add_argument("--window", type=int, default=4, help="updates in a window")
    args = parser.parse_args()
    from megarl import platforms

    platform = platforms.activate()
    from megarl.checkpoint.save.checkpointer import Checkpointer

    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        policy, samples = make_policy(directory, args)
        group = torch.distributed.new_group(backend="gloo")
        checkpointer = Checkpointer(policy.config, policy, group, print)
        policy.update(samples)
        rows = measure_disk(policy, checkpointer, args)
        rows.append(measure_stall(policy, samples, checkpointer, args))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{'name':20} {'ratio':>7} {'bound':>6}")
    for row in rows:
        print(f"{row['name']:20} {row['ratio']:7.3f} {row['bound']:6.2f}  {'ok' if row['ok'] else 'OUT OF BOUNDS'}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
