"""Host cost of a weight sync at the size of large models, without a GPU.

    python -m benchmarks.sync_scale [--json FILE] [--runs N] [--layers N] [--model NAME ...]

The tensors have the names, the order and the number of those of the large model, and tiny shapes; buckets are scaled
down with them, so that they are as many as for the large model. Rows:

- sender: CPU time of all that a trainer rank's host does in a sync if it owns all tensors (the gathers' copies with the
  check of each address, packing, sealing, the report), against a loop of `copy_` over tensors of the same shapes;
- engine: CPU time to check and load all received buckets into a real vLLM model, against a plain `load_weights` of the
  same tensors in one call. In place, as on CUDA, by the copies that the first sync has recorded. That first sync, which
  runs vLLM's loaders, and the layer-wise reload are measured for comparison, without a bound.

Times are CPU seconds of this process with one thread, so that other load counts little; medians of alternating runs.
A sender has broadcasts that do nothing and gathers without messages. It takes about five minutes, with --quick one.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from unittest.mock import patch

import torch

from benchmarks.lib.report import Ratio, finish, new_parser

if TYPE_CHECKING:
    from megarl.models.gather import TensorPart
    from megarl.models.info import ModelInfo
    from megarl.weights.backends import Backend
    from megarl.weights.buckets import Bucket, BucketPlan
    from megarl.weights.loaders import ModelLoader

MODELS = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
BUCKET_BYTES = 512 * 2**20
EXPERT_PARALLEL = 8  # of the trainer, so the number of senders
ENGINE_BOUND = 1.15


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="alternating repetitions (median)")
    parser.add_argument("--layers", type=int, help="only so many layers, for a quick look")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    if options.quick:
        options.runs, options.layers, options.model = 1, 2, MODELS[:1]

    from megarl import platforms

    platforms.activate()
    torch.set_num_threads(1)
    rows = []
    for name in options.model:
        with no_collection():
            bucket_bytes = scaled_bucket_bytes(name, options.layers)
            rows.append(sender_row(name, tiny_config(name, options.layers), bucket_bytes, options.runs))
        rows += engine_rows(name, options.layers, options.runs)
    return finish(rows, options)


def engine_rows(name: str, layers: int | None, runs: int) -> list[Ratio]:
    """Time the receiving half on a real vLLM model with the names of the large one."""
    from benchmarks.lib.vllm_model import vllm_model
    from megarl.weights.loaders import ModelLoader

    plan = scaled_plan(name, layers)
    tensors = random_tensors(plan)
    wires = packed(plan, tensors)
    with tempfile.TemporaryDirectory(prefix="sync-scale-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(tiny_config(name, layers)))
        with vllm_model(Path(directory)) as (model, model_config), no_collection():
            loader = ModelLoader(model, model_config, torch.device("cpu"))
            receive = receiver(plan, wires, loader)
            load_all = functools.partial(load_plainly, cast("LoadsWeights", model), tensors)
            times: dict[str, list[float]] = {}
            ways = ("in place by recorded copies", "layer-wise reload: this benchmark asks for it")
            first = cpu_seconds(receive)
            for _ in range(runs):
                times.setdefault("load_weights", []).append(cpu_seconds(load_all))
                for way in ways:
                    with forced(None if way == ways[0] else "this benchmark asks for it"):
                        times.setdefault(way, []).append(cpu_seconds(receive))
                    if loader.way != way:
                        raise SystemExit(f"the model was loaded another way: {loader.way}")
    plain, in_place, reload = (statistics.median(values) for values in times.values())
    ways_s = {"in place": in_place, "in place, first sync": first, "layer-wise reload": reload}
    return engine_rows_of(name, len(tensors), len(plan.buckets), plain, ways_s)


def engine_rows_of(name: str, tensors: int, buckets: int, plain: float, ways: dict[str, float]) -> list[Ratio]:
    """Return the rows of an engine. `plain`: the seconds of a plain load; `ways`: of each other one."""
    facts = {"tensors": tensors, "buckets": buckets, "load_weights us per tensor": round(plain / tensors * 1e6, 1)}
    return [
        Ratio(
            f"engine {name}, {way}",
            seconds / plain,
            ENGINE_BOUND if way == "in place" else None,
            details=facts | {"us per tensor": round(seconds / tensors * 1e6, 1)},
        )
        for way, seconds in ways.items()
    ]


class LoadsWeights(Protocol):
    """A model of vLLM's."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors under the names that they have in a checkpoint."""


@torch.no_grad()
def load_plainly(model: LoadsWeights, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    model.load_weights(tensors)


def config_of(name: str, layers: int | None) -> dict[str, Any]:
    from benchmarks.lib.manifests import CONFIGS

    return CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})


def tiny_config(name: str, layers: int | None) -> dict[str, Any]:
    from benchmarks.lib.manifests import TINY_SIZES

    return config_of(name, layers) | TINY_SIZES


def scaled_plan(name: str, layers: int | None) -> BucketPlan:
    """Return the plan of the tiny tensors, with about as many buckets as the large model has."""
    from benchmarks.lib.manifests import manifest_of
    from megarl.weights.buckets import bucket_plan

    tiny = manifest_of(tiny_config(name, layers), expert_parallel=EXPERT_PARALLEL, dtype="float32")
    return bucket_plan(tiny, scaled_bucket_bytes(name, layers), None)


def scaled_bucket_bytes(name: str, layers: int | None) -> int:
    """Return the bucket size of the tiny tensors that makes about as many buckets as the large model has."""
    from benchmarks.lib.manifests import manifest_of

    large = manifest_of(config_of(name, layers), expert_parallel=EXPERT_PARALLEL)
    tiny = manifest_of(tiny_config(name, layers), expert_parallel=EXPERT_PARALLEL, dtype="float32")
    return int(BUCKET_BYTES * sum(spec.nbytes for spec in tiny) / sum(spec.nbytes for spec in large))


def random_tensors(plan: BucketPlan) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, torch.randn(spec.shape)) for spec in plan.specs]


def packed(plan: BucketPlan, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the bytes of each bucket as they would arrive, with the trailer."""
    from megarl.weights.digest import digest

    wires = []
    for bucket in plan.buckets:
        wire_B = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
        for piece in bucket.pieces:
            content_B = tensors[piece.tensor][1].reshape(-1).view(torch.uint8)
            wire_B[piece.offset : piece.offset + piece.nbytes] = content_B[piece.start : piece.start + piece.nbytes]
        value = digest(wire_B[: bucket.nbytes], version=1, bucket=bucket.index)
        wire_B[bucket.nbytes :].view(torch.int64).copy_(value)
        wires.append(wire_B)
    return wires


def receiver(plan: BucketPlan, wires: Sequence[torch.Tensor], loader: ModelLoader) -> Callable[[], None]:
    """Return a function that makes one sync on an engine worker, whose broadcasts are copies of `wires`."""
    from megarl.weights.receiver import Receiver

    class Arrived:
        def wait(self) -> None:
            """The bytes are there."""

    class LocalReceiver(Receiver):
        def _post(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
            buffer_B = self._buffers.take()
            buffer_B[: bucket.wire_bytes].copy_(wires[bucket.index])
            return buffer_B, Arrived()

    local = LocalReceiver(None, plan, loader, torch.device("cpu"))  # type: ignore[arg-type]  # it has no group

    def sync() -> None:
        loader.start()
        local._receive_all(1, loader)
        loader.finish()

    return sync


@contextmanager
def forced(obstacle: str | None) -> Iterator[None]:
    """Replace the check of the model by this answer; None leaves the check."""
    from megarl.weights import loaders

    check = loaders.in_place_obstacle
    if obstacle is not None:
        loaders.in_place_obstacle = lambda *_: obstacle
    try:
        yield
    finally:
        loaders.in_place_obstacle = check


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave the many objects of the model out of Python's garbage collection, which would hit either side at random."""
    import gc

    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def cpu_seconds(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


SENDER_BOUND = 4.0


def sender_row(name: str, config: dict[str, Any], bucket_bytes: int, runs: int) -> Ratio:
    """Time one sync of a sender that owns all tensors of the tiny `config`, against a loop of `copy_` over them."""
    from benchmarks.lib.manifests import manifest_of
    from megarl.models.read_config import info_from_config
    from megarl.weights.buckets import bucket_plan

    plan = bucket_plan(manifest_of(config, expert_parallel=1, dtype="float32"), bucket_bytes, None)
    sync = one_sender(plan, whole_parts(info_from_config(config)))
    pairs = [(torch.empty(spec.shape), torch.randn(spec.shape)) for spec in plan.specs]

    def bare() -> None:
        for target, source in pairs:
            target.copy_(source)

    seconds: dict[str, list[float]] = {"copy_": [], "sender": []}
    for function in (bare, sync):  # pages and caches
        function()
    for _ in range(runs):
        for kind, function in (("copy_", bare), ("sender", sync)):
            start = time.process_time()
            function()
            seconds[kind].append(time.process_time() - start)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return sender_row_of(name, len(plan.specs), len(plan.buckets), medians)


def sender_row_of(name: str, tensors: int, buckets: int, seconds: dict[str, float]) -> Ratio:
    """Return the row of a sender. `seconds`: of the loop of `copy_` and of the sender."""
    details: dict[str, float] = {"tensors": tensors, "buckets": buckets}
    details |= {f"{kind} us per tensor": round(value / tensors * 1e6, 2) for kind, value in seconds.items()}
    return Ratio(f"sender {name}", seconds["sender"] / seconds["copy_"], SENDER_BOUND, details=details)


def whole_parts(info: ModelInfo) -> dict[int, TensorPart]:
    """Return the Hugging Face tensors of a rank that holds the whole model, in Megatron's fused parameters."""
    from megarl.models.gather import TensorPart
    from megarl.models.shards import Shard, table

    parts: dict[int, TensorPart] = {}
    for entry in table(info).values():
        shard = Shard(entry.megatron, torch.nn.Parameter(torch.randn(entry.shard_shape(0, 1))), entry, 0, 1)
        for source in range(len(entry.names)):
            parts[len(parts)] = TensorPart(shard, source, torch.float32, None)
    return parts


class NoTransfer:
    """A process group, and a broadcast in it, that do nothing."""

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> NoTransfer:
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True

    def abort(self) -> None:
        """Nothing runs."""


def one_sender(plan: BucketPlan, parts: dict[int, TensorPart]) -> Callable[[], None]:
    """Return a function that makes one sync on a sender, whose broadcasts do nothing, with a real store."""
    from megarl.models.gather import GlooWaiter, build_gathers
    from megarl.weights.backends import BackendKind
    from megarl.weights.bucket_packer import BucketPacker
    from megarl.weights.operation_order import schedule
    from megarl.weights.sending import Sending
    from megarl.weights.store import SyncStore
    from megarl.weights.transport import Group, GroupMembers
    from megarl.weights.watch import end_key

    nothing = BackendKind("cpu", on_streams=True, make=lambda store, place: cast("Backend", NoTransfer()))
    cpu = torch.device("cpu")
    packer = BucketPacker(plan, 0, cpu)
    gathers = build_gathers(parts, packer.requests(), cpu, GlooWaiter())
    store = SyncStore("127.0.0.1", 0, server=True)
    with patch.dict("megarl.weights.backends.BACKENDS", nothing=nothing):
        group = Group(store, GroupMembers(0, (0,), (), (), "nothing", 60.0), 0)
    group._backend = nothing.make(store.prefixed("rendezvous"), None)  # type: ignore[arg-type]  # it connects nobody
    syncs = iter(range(10**6))

    def sync() -> None:
        number = next(syncs)
        group.begin(number, len(plan.buckets), 60.0)
        sending = Sending(group, schedule(plan), gathers, packer, 0, number)
        sending.run()
        assert len(sending.digests) == len(plan.buckets)
        store.put_once(end_key(group.stage), {"status": "published"})

    return sync


if __name__ == "__main__":
    raise SystemExit(main())
