"""Checkpoint conversion compared with `cp -r` of the same bytes: speed and private memory, for dense and MoE models.

    python -m benchmarks.convert [--json FILE] [--layers N] [--rounds N] [--dir DIR] [--quick]

The bf16 weights are generated: `dense` in the real shape of a 4B model (36 layers, 8.0 GB), `moe` with the 18,867
tensors of a 30B-A3B (48 layers, 128 experts) at a width that gives 8.4 GB. Numbers are medians of rounds in which the
copy and the conversion of both models alternate; before each run everything is synced and the caches are dropped. A
conversion is timed from process start to exit, fsync included; `cp` is timed with `sync`. Memory is measured in
separate runs: the anonymous and shared pages of all processes of the tree.

What a run has made is deleted before the next one begins, so that no more than one copy of a model lies on the disk
alongside the sources: 26 GB at most. It takes about half an hour; --quick, with small models, two minutes.
"""

import contextlib
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

from benchmarks.lib.report import ROOT, Ratio, finish, new_parser
from benchmarks.lib.whole_run import environment
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.export import ExportedTensor, plan_files
from megarl.models.hf.read_config import info_from_config
from megarl.models.hf.safetensors import SafetensorsWriter, write_index
from megarl.models.megatron.shards import table

COMMAND_TIMEOUT_S = 3600.0  # ends a command that hangs; the slowest one takes minutes
SPEED_BOUND, MOE_BOUND, MEMORY_BOUND_GIB = 2.0, 1.5, 1.5
DENSE_LAYERS, MOE_LAYERS = 36, 48
KINDS = ("import", "export")


@dataclass(frozen=True)
class BenchModel:
    """A model on the disk in up to two formats; `work` also gets what a run makes."""

    name: str
    info: ModelInfo
    work: Path

    def source(self, kind: str) -> Path:
        """The directory that a conversion reads."""
        return self.work / ("hf" if kind == "import" else "megatron")

    def target(self, kind: str) -> Path:
        """The directory that a conversion makes."""
        return self.work / ("megatron" if kind == "import" else "exported")

    def command(self, kind: str) -> list[str]:
        """The conversion."""
        read, write = ("--hf", "--out") if kind == "import" else ("--megatron", "--hf")
        return convert_command(kind, read, self.source(kind), write, self.target(kind))


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
    specs = plan_files(tensors, 4 * 2**30)
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


def drop_caches(paths: Sequence[Path]) -> None:
    """Sync and drop the page cache; who is not root drops that of the files below `paths`."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in (p for root in paths for p in root.rglob("*") if p.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(command: Sequence[str], out: Path) -> float:
    """Return the seconds of a command that makes `out`, which is deleted afterwards."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(), timeout=COMMAND_TIMEOUT_S)
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    return seconds


def copy_command(source: Path, out: Path) -> list[str]:
    return ["sh", "-c", f"cp -r --reflink=never '{source}' '{out}' && sync"]


def convert_command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools/checkpoint/convert.py"), *map(str, arguments)]


def measure_speed(kind: str, models: Sequence[BenchModel], rounds: int) -> list[Ratio]:
    """Copy and convert every model in each round with cold caches, then each once with warm ones; return the rows."""
    copied: dict[str, list[float]] = {model.name: [] for model in models}
    converted: dict[str, list[float]] = {model.name: [] for model in models}
    for _ in range(rounds):
        for model in models:
            source, copy = model.source(kind), model.work / "copy"
            drop_caches([source])
            copied[model.name].append(timed(copy_command(source, copy), copy))
            drop_caches([source])
            converted[model.name].append(timed(model.command(kind), model.target(kind)))
    found = {}
    for model in models:
        source, copy = model.source(kind), model.work / "copy"
        warm_copy = timed(copy_command(source, copy), copy)
        warm = timed(model.command(kind), model.target(kind))
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        found[model.name] = {
            "bytes": size,
            "seconds": converted[model.name],
            "cp_seconds": copied[model.name],
            "warm_ratio": warm / warm_copy,
            "load": os.getloadavg()[0],
        }
    return speed_rows(kind, found)


def speed_rows(kind: str, measured: dict[str, dict[str, Any]]) -> list[Ratio]:
    """Return the rows of a conversion's speed. `measured`: by model, with its bytes and the seconds of the rounds."""
    rows, per_byte = [], {}
    for name, found in measured.items():
        seconds = statistics.median(found["seconds"])
        per_byte[name] = seconds / found["bytes"]
        details = {**found, "gb_per_s": found["bytes"] / seconds / 1e9}
        ratio = seconds / statistics.median(found["cp_seconds"])
        rows.append(Ratio(f"{name}_{kind}", ratio, SPEED_BOUND, details=details))
    return [*rows, Ratio(f"moe_{kind}_per_byte of dense", per_byte["moe"] / per_byte["dense"], MOE_BOUND)]


def private_memory(command: list[str]) -> int:
    """Return the peak bytes of anonymous and shared pages of the process tree of a command."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    peak = 0
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, _tree_memory(process.pid))

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
    return peak


def _tree_memory(pid: int) -> int:
    """Return the bytes of anonymous and shared pages of a process and its descendants."""
    found = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(OSError):  # it has ended
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                found += sum(
                    1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem"))
                )
    return found


def memory_row(kind: str, model: BenchModel, peak: int) -> Ratio:
    """Return the row of a conversion's memory above the largest fused tensor."""
    largest = largest_tensor(model.info)
    details = {"peak_mib": peak / 2**20, "largest_mib": largest / 2**20, "unit": "GiB above the tensor"}
    return Ratio(f"{model.name}_{kind}_memory", (peak - largest) / 2**30, MEMORY_BOUND_GIB, details=details)


def largest_tensor(info: ModelInfo) -> int:
    """Return the bytes of the largest Megatron parameter in bf16."""
    return max(2 * torch.Size(entry.shard_shape(0, 1)).numel() for entry in table(info).values())


def measure(kind: str, models: Sequence[BenchModel], rounds: int) -> list[Ratio]:
    """Measure one conversion of all models, and leave what it makes in place of its source; return the rows."""
    rows = measure_speed(kind, models, rounds)
    for model in models:
        rows.append(memory_row(kind, model, private_memory(model.command(kind))))
        verify = convert_command("verify", model.source(kind), model.target(kind))
        subprocess.run(verify, check=True, stdout=subprocess.DEVNULL, env=environment(), timeout=COMMAND_TIMEOUT_S)
        shutil.rmtree(model.source(kind))
    return rows


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=DENSE_LAYERS, help="of the dense model; moe scales with it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="directory for up to 26 GB (default: a temporary directory)")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rounds = 2, 1
    moe_layers = max(1, options.layers * MOE_LAYERS // DENSE_LAYERS)
    configs = {"dense": dense_config(options.layers), "moe": moe_config(moe_layers)}
    rows: list[Ratio] = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="convert-") as directory:
        works = {name: Path(directory, name) for name in configs}
        models = [BenchModel(name, generate(works[name] / "hf", each), works[name]) for name, each in configs.items()]
        for kind in KINDS:
            rows += measure(kind, models, options.rounds)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
