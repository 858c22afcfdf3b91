"""Weight sync from a TP2 trainer to one vLLM engine, compared with the sum of its parts measured in the same run.

    python -m benchmarks.weight_sync [--json FILE] [--runs N] [--bucket-mb M]

The reference is the sum of three parts: plain sends and receives of what the ranks hold of each tensor, a broadcast of
the same bytes at its best bucket size, and vLLM's load of the same tensors from its own memory. The sync is timed with
and without digests, whose cost is the difference. All measurements alternate in one run with one thread per process,
and medians are compared. Memory is the peak of each process's private bytes (smaps_rollup) over several syncs, minus
those before it joined the weight-sync group. The engine's is measured twice: with vLLM's layer-wise reload, which its
CPU kernels need, and loaded in place after these kernels were replaced by torch's, minus the bytes before these syncs.
Both may take three buckets and twice the largest module that vLLM fuses from several tensors; the embedding, which is
larger here, is none. (A reload on a CPU also makes a packed copy of each module, and so can need more: its row shows
it.)
It takes about three minutes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from benchmarks.lib.live_engine import EngineWorker
from benchmarks.lib.random_model import make_model
from benchmarks.lib.ranks import MEASURED, join_ranks, ranks_parser, run_ranks
from benchmarks.lib.report import Ratio, finish

if TYPE_CHECKING:
    from megarl.models.hf.export import HFExporter
    from megarl.weights.group.transport import Group

RATIO_BOUND = 1.5
DIGEST_BOUND = 0.25
# 128 M parameters; the tied embedding is larger than a bucket.
DIMS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
QUICK_DIMS: dict[str, Any] = {
    **DIMS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
BROADCAST_MB = (8, 16, 32, 64, 128)
TIMEOUT_S = 1500


def main() -> int:
    parser = ranks_parser(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="alternating repetitions (median)")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    options = parser.parse_args()
    if options.quick:
        options.runs, options.bucket_mb = 1, 1.0
    if options.rank_of is not None:
        rank_main(options.rank_of, options.runs, options.bucket_mb)
        return 0
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as name:
        make_model(Path(name, "model"), **(QUICK_DIMS if options.quick else DIMS))
        arguments = {"runs": options.runs, "bucket-mb": options.bucket_mb}
        measured = run_ranks("weight_sync", Path(name), arguments, TIMEOUT_S)
    print(f"{measured['bytes'] / 2**20:.0f} MiB in {measured['buckets']} buckets; medians in ms:")
    for name, value in measured["seconds"].items():
        print(f"  {name:<28} {value * 1e3:9.1f}")
    return finish(make_rows(measured), options)


class WorkerExtension(EngineWorker):
    """Methods that vLLM adds to the engine's worker: the engine's side of a sync's parts."""

    vllm_config: Any  # an attribute of vLLM's worker

    def bench_memory(self, begin: bool) -> int:
        """Begin to watch the private memory of this process, or end it and return the peak above the beginning."""
        if begin:
            self._bench_memory = PrivateMemory()
            return 0
        return self._bench_memory.stop()

    def bench_broadcast(self, bucket_bytes: int, total: int) -> float:
        return bare_broadcast(self.weight_transfer_engine._receiver.group, bucket_bytes, total)

    def bench_load(self, path: str) -> float:
        """Return the seconds of vLLM's reload of tensors that are already in memory, in the order of the layers."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if getattr(self, "_bench_tensors", None) is None:
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            self._bench_tensors = sorted(tensors.items(), key=lambda item: layer_order(item[0]))
        model = self.model_runner.get_model()
        start = time.perf_counter()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(self._bench_tensors)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        return time.perf_counter() - start

    def bench_digest(self, on: bool) -> None:
        switch_digest("megarl.weights.receive.receiver", on)


class PrivateMemory:
    """Samples the private bytes of this process (smaps_rollup) in a thread, until `stop`."""

    def __init__(self) -> None:
        self._before = self._peak = private_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the peak above the bytes at the beginning."""
        self._stopped.set()
        self._thread.join(10)
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            self._peak = max(self._peak, private_bytes())


def private_bytes() -> int:
    """Return the bytes that this process has for itself alone."""
    return int(psutil.Process().memory_full_info().uss)


def switch_digest(module: str, on: bool) -> None:
    """Restore a module's digest function, or replace it by one that takes no time."""
    from megarl.weights.plan.digest import digest

    def nothing(payload: torch.Tensor, *, version: int, bucket: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    importlib.import_module(module).digest = digest if on else nothing  # type: ignore[attr-defined]


def layer_order(name: str) -> tuple[int, str]:
    """Return a sort key by layer: embeddings first, final norm and output layer last."""
    parts = name.split(".")
    return (int(parts[2]) if parts[1] == "layers" else -1 if "embed" in name else 10**6, name)


def bare_broadcast(group: Group, bucket_bytes: int, total: int) -> float:
    """Return the seconds to broadcast `total` bytes from rank 0 by one uint8 buffer, bucket after bucket."""
    buffer_B = torch.ones(bucket_bytes, dtype=torch.uint8)
    group.deadline = time.monotonic() + 120.0
    group.broadcast(buffer_B[:1], 0).wait()
    start = time.perf_counter()
    for offset in range(0, total, bucket_bytes):
        group.broadcast(buffer_B[: min(bucket_bytes, total - offset)], 0).wait()
    return time.perf_counter() - start


@torch.no_grad()
def bare_gather(exporter: HFExporter) -> float:
    """Return the seconds to bring each tensor to trainer rank 0 as plain torch would, if all were split by rows.

    Rank 0 copies its half of each split tensor into a new one, and receives the other half from rank 1.
    """
    rank = torch.distributed.get_rank()
    start = time.perf_counter()
    for number, part in exporter._parts().items():
        if part.group is None:
            continue
        half = math.prod(exporter.manifest()[number].shape) // 2
        own = part.shard.parameter.data.reshape(-1)[:half]
        if rank == 1:
            torch.distributed.send(own, dst=0, group=part.group)
            continue
        full = torch.empty(2 * half, dtype=own.dtype)
        full[:half].copy_(own)
        torch.distributed.recv(full[half:], src=1, group=part.group)
    return time.perf_counter() - start


def rank_main(directory: Path, runs: int, bucket_mb: float) -> None:
    """Run one of the two trainer ranks; rank 0 also runs the front end of the engine."""
    join_ranks()
    from megarl.checkpoint.format.load_weights import load_weights
    from megarl.models.hf.export import HFExporter
    from megarl.models.hf.read_config import load_info
    from megarl.models.megatron.build_model import build_model, transformer_config
    from megarl.models.megatron.layout import Layout
    from megarl.trainer import parallel

    layout = Layout(tensor=2, world_size=2)
    parallel.initialize(layout, seed=0, timeout_s=600)
    info = load_info(directory / "model")
    config = transformer_config(info, layout, "fp32", {}, initialize=False)
    chunks = build_model(info, config, layout)
    load_weights(chunks, info, str(directory / "model"))
    Bench(directory, HFExporter(chunks, info, torch.float32), bucket_mb).run(runs)
    torch.distributed.barrier()


class Bench:
    """The measurements on one trainer rank; `times` holds the seconds of each, by name."""

    def __init__(self, directory: Path, exporter: HFExporter, bucket_mb: float) -> None:
        from megarl.weights.plan.settings import SyncSettings
        from megarl.weights.send.sender import WeightSender

        self.directory = directory
        self.exporter = exporter
        self.rank = torch.distributed.get_rank()
        settings = SyncSettings(
            bucket_bytes=int(bucket_mb * 2**20), sync_s=120.0, restarts=0, transport="gloo", run_dir=directory
        )
        self.sender = WeightSender(settings, exporter)
        self.engine: Any = None
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, int] = {}

    def run(self, runs: int) -> None:
        pool = None
        if self.rank == 0:
            from benchmarks.lib.live_engine import LivePool, LiveReplica

            self.engine = LiveReplica(
                self.directory / "model", worker_extension_cls="benchmarks.weight_sync.WorkerExtension"
            )
            pool = LivePool(self.engine)
        with self._watched("layer-wise reload"):
            self.sender.connect(pool)
            version = self._publish(11, 0)
        self.times.clear()
        for _ in range(runs):
            version = self._publish(1, version)
            self._switch_digest(False)
            version = self._publish(1, version, "sync without digest")
            self._switch_digest(True)
            self._time("gather", partial(bare_gather, self.exporter))
            for size in BROADCAST_MB:
                self._time(f"broadcast {size} MiB", partial(self._broadcast, size * 2**20))
            self._time("load", lambda: self._worker("bench_load", str(self.directory / "model" / "model.safetensors")))
        self._measure_in_place(version)
        if self.rank == 0:
            self._write_results()
            self.engine.shutdown()
        torch.distributed.barrier()

    def _publish(self, times: int, version: int, name: str = "sync") -> int:
        for _ in range(times):
            version += 1
            torch.distributed.barrier()
            report = self.sender.publish(version)
            self.times.setdefault(name, []).append(report.seconds)
            if name == "sync":
                self.times.setdefault("digests, both sides", []).append(report.digest_seconds)
                for phase, seconds in report.phases.items():
                    self.times.setdefault(f"sync: {phase}", []).append(seconds)
        return version

    def _measure_in_place(self, version: int) -> None:
        """Watch the memory of syncs that are loaded in place. The sync before them rebuilds the weights' layout."""
        self._worker("unpack")
        version = self._publish(1, version, "other")
        with self._watched("in place"):
            self._publish(6, version, "sync in place")
        if self.rank == 0 and self._worker("loaded") != "in place by recorded copies":
            raise SystemExit(f"the engine was not loaded in place: {self._worker('loaded')}")

    def _switch_digest(self, on: bool) -> None:
        switch_digest("megarl.weights.plan.bucket_packer", on)
        self._worker("bench_digest", on)

    def _broadcast(self, bucket_bytes: int) -> float:
        if self.rank != 0:
            return 0.0
        total = self.sender.plan.total_bytes
        remote = self._worker_future("bench_broadcast", bucket_bytes, total)
        assert self.sender._group is not None
        own = bare_broadcast(self.sender._group, bucket_bytes, total)
        return max(own, remote.result(120)[0])

    def _worker(self, method: str, *args: object) -> Any:  # noqa: ANN401  # as WorkerExtension's method
        return self._worker_future(method, *args).result(300)[0] if self.rank == 0 else 0.0

    def _worker_future(self, method: str, *args: object) -> Future[list[Any]]:
        return asyncio.run_coroutine_threadsafe(
            self.engine._engine.collective_rpc(method, args=args), self.engine._loop
        )

    def _time(self, name: str, function: Callable[[], float]) -> None:
        torch.distributed.barrier()
        self.times.setdefault(name, []).append(function())

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Note the peak of private bytes of each process within the block; the trainer's, which is the same, once."""
        torch.distributed.barrier()
        own = PrivateMemory()
        self._worker("bench_memory", True)
        torch.distributed.barrier()
        yield
        torch.distributed.barrier()
        peaks: list[Any] = [None, None]
        torch.distributed.all_gather_object(peaks, own.stop())
        self.memory[f"engine, {name}"] = self._worker("bench_memory", False)
        for rank, peak in enumerate(peaks):
            self.memory.setdefault(f"trainer rank {rank}", peak)

    def _write_results(self) -> None:
        plan = self.sender.plan
        sizes = {spec.name: spec.nbytes for spec in plan.specs}
        modules: dict[str, int] = {}
        fused = set()
        for name, nbytes in sizes.items():
            path, kind, _ = name.rsplit(".", 2)
            group = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
            module = f"{path}.{group[kind]}" if kind in group else name
            modules[module] = modules.get(module, 0) + nbytes
            fused |= {module} if kind in group else set()
        measured = {
            "seconds": {name: statistics.median(values) for name, values in self.times.items()},
            "memory": self.memory,
            "bytes": plan.total_bytes,
            "buckets": len(plan.buckets),
            "bucket_bytes": plan.bucket_bytes,
            "largest_tensor": max(sizes.values()),
            "largest_fused": max(modules[module] for module in fused),
        }
        (self.directory / MEASURED).write_text(json.dumps(measured))


def make_rows(measured: dict[str, Any]) -> list[Ratio]:
    """Return the rows of the report from what rank 0 has written."""
    seconds = measured["seconds"]
    broadcasts = {name: value for name, value in seconds.items() if name.startswith("broadcast")}
    best = min(broadcasts, key=broadcasts.__getitem__)
    reference = seconds["gather"] + seconds[best] + seconds["load"]
    without_digest = seconds["sync without digest"]
    digest_cost = (seconds["sync"] - without_digest) / without_digest
    buckets = 3 * measured["bucket_bytes"]
    details = {
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "reference_s": round(reference, 4),
        "best_broadcast": best,
        "bytes": measured["bytes"],
        "buckets": measured["buckets"],
        "ratio_with_digest": round(seconds["sync"] / reference, 3),
    }
    rows = [
        Ratio("weight_sync_time", without_digest / reference, RATIO_BOUND, details=details),
        Ratio("weight_sync_digest_cost", digest_cost, DIGEST_BOUND),
    ]
    for name, peak in sorted(measured["memory"].items()):
        bound = buckets + (2 * measured["largest_fused"] if name.startswith("engine") else measured["largest_tensor"])
        facts = {"peak_mib": round(peak / 2**20, 1), "bound_mib": round(bound / 2**20, 1)}
        rows.append(Ratio(f"weight_sync_memory {name}", peak / bound, 1.0, details=facts))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
