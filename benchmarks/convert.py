"""Checkpoint conversion compared with `cp -r` of the same bytes: speed and private memory, for dense and MoE models.

    python benchmarks/convert.py [--json FILE] [--layers N] [--rounds N] [--workers N] [--dir DIR]
    python benchmarks/convert.py --layers 8 --rounds 1     # about 2 GB, for a quick look

The bf16 weights are generated: `dense` in the real shape of a 4B model (36 layers, 8.0 GB), `moe` with the 18,867
tensors of a 30B-A3B (48 layers, 128 experts) at a width that gives 8.4 GB. Numbers are medians of alternating runs;
before each run everything is synced and the caches are dropped. A conversion is timed from process start to exit,
fsync included; `cp` is timed with `sync`. Memory is measured in separate runs: the anonymous and shared pages of all
processes of the tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.models.export import ExportedTensor, plan_files
from megarl.models.info import ModelInfo
from megarl.models.read_config import info_from_config
from megarl.models.safetensors_io import SafetensorsWriter, TensorHeader, write_index
from megarl.models.shards import table

ROOT = Path(__file__).resolve().parents[1]
COMMAND_TIMEOUT_S = 3600.0  # ends a command that hangs; the slowest one takes minutes
SPEED_BOUND, MOE_BOUND, MEMORY_BOUND_GIB = 2.0, 1.5, 1.5
DENSE_LAYERS, MOE_LAYERS = 36, 48


@dataclass(frozen=True)
class ConversionResult:
    """One line of the report; `ratio` must not exceed `bound`."""

    name: str
    ratio: float
    bound: float
    details: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.ratio <= self.bound


def dense_config(layers: int) -> dict[str, Any]:
    """Return the config.json of Qwen3-4B with `layers` layers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
    }


def moe_config(layers: int) -> dict[str, Any]:
    """Return the config.json of a narrower Qwen3-30B-A3B with `layers` layers."""
    return {
        **dense_config(layers),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def generate(directory: Path, config: dict[str, Any]) -> ModelInfo:
    """Write random bf16 weights of the config's shape in files of 4 GiB, without a tokenizer."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    info = info_from_config(config)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2**15, (2**27,), generator=generator, dtype=torch.int16).view(torch.bfloat16)
    tensors = [
        ExportedTensor(name, shape, torch.bfloat16, 0)
        for entry in table(info).values()
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    ]
    files = plan_files(tensors, 4 * 2**30)
    specs = [(name, [TensorHeader(t.name, t.shape, t.dtype) for t in part]) for name, part in files]
    for number, (name, part) in enumerate(specs):
        writer = SafetensorsWriter(directory / name, part)
        for offset, spec in enumerate(part):
            count = torch.Size(spec.shape).numel()
            whole = noise.repeat(-(-count // len(noise))) if count > len(noise) else noise
            # Each tensor starts at another place in the noise, so that no two are equal.
            start = (offset * 7919 + number * 104729) % max(1, len(whole) - count)
            writer.write(spec.name, whole[start : start + count].view(spec.shape))
        writer.close()
    if len(specs) > 1:
        write_index(directory, specs)
    return info


def drop_caches(paths: Sequence[Path]) -> str:
    """Sync and drop the page cache; return the method that was used."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    except OSError:
        for path in (p for root in paths for p in root.rglob("*") if p.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "posix_fadvise"


def timed(command: Sequence[str], out: Path) -> float:
    """Return the seconds of a command that makes `out`."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment(), timeout=COMMAND_TIMEOUT_S)
    return time.perf_counter() - began


def _environment() -> dict[str, str]:
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))


def copy_command(source: Path, out: Path) -> list[str]:
    return ["sh", "-c", f"cp -r --reflink=never '{source}' '{out}' && sync"]


def convert_command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools/checkpoint/convert.py"), *map(str, arguments)]


def against_copy(
    name: str, source: Path, out: Path, command: list[str], args: argparse.Namespace
) -> tuple[ConversionResult, dict[str, float]]:
    """Run `command` and a copy of its source alternately with cold caches, then each once with warm caches.

    Returns the result, and the seconds and the seconds per byte of the conversion.
    """
    copied, converted = [], []
    copy = out.with_name("copy")
    for _ in range(args.rounds):
        how = drop_caches([source])
        copied.append(timed(copy_command(source, copy), copy))
        shutil.rmtree(copy)
        drop_caches([source])
        converted.append(timed(command, out))
    warm_copy = timed(copy_command(source, copy), copy)
    shutil.rmtree(copy)
    warm = timed(command, out)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    seconds, reference = statistics.median(converted), statistics.median(copied)
    details = {
        "bytes": size,
        "seconds": converted,
        "cp_seconds": copied,
        "gb_per_s": size / seconds / 1e9,
        "warm_ratio": warm / warm_copy,
        "caches": how,
        "workers": args.workers,
        "load": os.getloadavg()[0],
    }
    return ConversionResult(name, seconds / reference, SPEED_BOUND, details), {
        "seconds": seconds,
        "per_byte": seconds / size,
    }


def private_memory(command: list[str], out: Path, largest: int, name: str) -> ConversionResult:
    """Measure the peak of anonymous + shared pages of the process tree, minus the bytes of the largest fused tensor."""
    shutil.rmtree(out, ignore_errors=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment())
    peak = {"private": 0, "file": 0}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.05):
            private, mapped = _tree_memory(process.pid)
            peak["private"], peak["file"] = max(peak["private"], private), max(peak["file"], mapped)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        code = process.wait(COMMAND_TIMEOUT_S)
    finally:
        process.kill()
        over.set()
        sampler.join()
    if code:
        raise SystemExit(f"{command} failed with code {code}")
    details = {f"peak_{kind}_mib": value / 2**20 for kind, value in peak.items()} | {"largest_mib": largest / 2**20}
    return ConversionResult(
        name, (peak["private"] - largest) / 2**30, MEMORY_BOUND_GIB, details | {"unit": "GiB above the tensor"}
    )


def _tree_memory(pid: int) -> tuple[int, int]:
    """Return the bytes of (private and shared, file-mapped) pages of a process and its descendants."""
    private = mapped = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
        private += values["Pss_Anon"] + values["Pss_Shmem"]
        mapped += values["Pss_File"]
    return private, mapped


def largest_tensor(info: ModelInfo) -> int:
    """Return the bytes of the largest Megatron parameter in bf16."""
    return max(2 * torch.Size(entry.shard_shape(0, 1)).numel() for entry in table(info).values())


def measure(
    name: str, config: dict[str, Any], work: Path, args: argparse.Namespace
) -> tuple[list[ConversionResult], list[float]]:
    """Measure speed and memory of one model; return the results and the seconds per byte of import and export."""
    source, megatron, out = work / "hf", work / "megatron", work / "exported"
    info = generate(source, config)
    forward = convert_command("import", "--hf", source, "--out", megatron, "--workers", args.workers)
    back = convert_command("export", "--megatron", megatron, "--hf", out, "--workers", args.workers)
    results, per_byte = [], []
    for kind, origin, target, command in (("import", source, megatron, forward), ("export", megatron, out, back)):
        result, costs = against_copy(f"{name}_{kind}", origin, target, command, args)
        results.append(result)
        per_byte.append(costs["per_byte"])
        show(result)
    for kind, target, command in (("import", megatron, forward), ("export", out, back)):
        results.append(private_memory(command, target, largest_tensor(info), f"{name}_{kind}_memory"))
        show(results[-1])
    verify = convert_command("verify", source, out)
    subprocess.run(verify, check=True, stdout=subprocess.DEVNULL, env=_environment(), timeout=COMMAND_TIMEOUT_S)
    shutil.rmtree(work)
    return results, per_byte


def show(result: ConversionResult) -> None:
    state = "ok" if result.ok else "ABOVE ITS BOUND"
    print(f"{result.name}: {result.ratio:.2f} (bound {result.bound}) {state}  {_short(result.details)}", flush=True)


def _short(details: dict[str, Any]) -> str:
    def text(value: object) -> str:
        if isinstance(value, list):
            return "/".join(map(text, value))
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key} {text(value)}" for key, value in details.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--layers", type=int, default=DENSE_LAYERS, help="of the dense model; moe scales with it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="default: the converter's own default")
    parser.add_argument("--dir", type=Path, help="directory for up to 26 GB (default: a temporary directory)")
    parser.add_argument("--only", choices=["dense", "moe"])
    args = parser.parse_args()
    moe_layers = max(1, args.layers * MOE_LAYERS // DENSE_LAYERS)
    models = {"dense": dense_config(args.layers), "moe": moe_config(moe_layers)}
    results: list[ConversionResult] = []
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="convert-") as directory:
        for name, config in models.items():
            if args.only in (None, name):
                found, costs[name] = measure(name, config, Path(directory) / name, args)
                results += found
    if len(costs) == 2:
        for index, kind in enumerate(("import", "export")):
            ratio = costs["moe"][index] / costs["dense"][index]
            results.append(ConversionResult(f"moe_{kind}_per_byte", ratio, MOE_BOUND, {"against": f"dense_{kind}"}))
            show(results[-1])
    if args.json:
        rows = [{"name": r.name, "ratio": r.ratio, "bound": r.bound, "ok": r.ok, "details": r.details} for r in results]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
