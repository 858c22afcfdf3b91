"""Host cost of a weight sync at the size of large models, without a GPU.

    python benchmarks/sync_scale.py [--json FILE] [--runs N] [--layers N] [--model NAME ...]

The tensors have the names, the order and the number of those of the large model, and tiny shapes; buckets are scaled
down with them, so that they are as many as for the large model. Rows:

- digest: torch operations of one 512 MiB bucket as an accelerator executes them, and its temporary memory;
- bucket fill: the median size of the buckets of the large model (real shapes, bf16), 512 MiB each;
- sender: CPU time of all that a trainer rank's host does in a sync if it owns all tensors (the gathers' copies with the
  check of each address, packing, sealing, the report), against a loop of `copy_` over tensors of the same shapes;
- store: requests to the sync's store and CPU time of its server, with 32 and 128 members;
- engine: CPU time to check and load all received buckets into a real vLLM model, against a plain `load_weights` of the
  same tensors in one call. In place, as on CUDA, by the copies that the first sync has recorded. That first sync, which
  runs vLLM's loaders, and the layer-wise reload are measured for comparison, without a bound.

Times are CPU seconds of this process with one thread, so that other load counts little; medians of alternating runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

if TYPE_CHECKING:  # megarl's modules are imported after `platforms.activate`
    from megarl.weights.buckets import Bucket, BucketPlan
    from megarl.weights.loaders import ModelLoader

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from report import Ratio, add_json, finish  # noqa: E402
from sync_scale_sender import sender_row, store_rows  # noqa: E402

MODELS = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
BUCKET_BYTES = 512 * 2**20
EXPERT_PARALLEL = 8  # of the trainer, so the number of senders
DIGEST_OPERATIONS = 192
TEMPORARIES = 1 / 4  # of a bucket
FILL = 0.9  # of a bucket
ENGINE_BOUND = 1.15
STORE_SYNCS = 4  # per run: each is short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--runs", type=int, default=5, help="alternating repetitions (median)")
    parser.add_argument("--layers", type=int, help="only so many layers, for a quick look")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()

    from megarl import platforms

    platforms.activate()
    torch.set_num_threads(1)
    rows = digest_rows(BUCKET_BYTES) + store_rows(STORE_SYNCS * options.runs)
    for name in options.model:
        rows.append(fill_row(name, options.layers))
        with no_collection():
            bucket_bytes = scaled_bucket_bytes(name, options.layers)
            rows.append(sender_row(name, tiny_config(name, options.layers), bucket_bytes, options.runs))
        rows += engine_rows(name, options.layers, options.runs)
    return finish(rows, options)


def digest_rows(bucket_bytes: int) -> list[Ratio]:
    """Count operations and temporary memory of the digest of one bucket, on the path that accelerators take."""
    from megarl.weights.digest import device_row_sums, digest
    from tests.support.operations import CountOperations

    payload_B = torch.zeros(bucket_bytes, dtype=torch.uint8)
    digest(payload_B[:8], version=1, bucket=0)  # the coefficients are made once
    with CountOperations() as counter:
        digest(payload_B, version=1, bucket=0, row_sums=device_row_sums)
    temporaries = counter.peak_bytes / bucket_bytes
    return [
        Ratio(
            "digest operations", counter.operations / DIGEST_OPERATIONS, 1.0, details={"operations": counter.operations}
        ),
        Ratio(
            "digest temporaries", temporaries / TEMPORARIES, 1.0, details={"part of a bucket": round(temporaries, 3)}
        ),
    ]


def fill_row(name: str, layers: int | None) -> Ratio:
    """Compare the median bucket of the real shapes with the bucket size, for engines that load in place."""
    from megarl.weights.buckets import RELOAD_LAYER_SPAN, bucket_plan
    from tests.support.manifests import manifest_of

    manifest = manifest_of(config_of(name, layers), expert_parallel=EXPERT_PARALLEL)
    fill = {}
    for span in (None, RELOAD_LAYER_SPAN):
        plan = bucket_plan(manifest, BUCKET_BYTES, span)
        fill[span] = statistics.median(bucket.nbytes for bucket in plan.buckets) / BUCKET_BYTES
    details = {
        "tensors": len(manifest),
        "median fill": round(fill[None], 3),
        "median fill for engines that reload": round(fill[RELOAD_LAYER_SPAN], 3),
    }
    return Ratio(f"bucket fill {name}", FILL / fill[None], 1.0, details=details)


def engine_rows(name: str, layers: int | None, runs: int) -> list[Ratio]:
    """Time the receiving half on a real vLLM model with the names of the large one."""
    from megarl.weights.loaders import ModelLoader
    from tests.support.vllm_model import vllm_model

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
    plain, *received = (statistics.median(values) for values in times.values())
    measured = [
        ("in place", received[0], ENGINE_BOUND),
        ("in place, first sync", first, None),
        ("layer-wise reload", received[1], None),
    ]
    facts = {"tensors": len(tensors), "buckets": len(plan.buckets), "load_weights us per tensor": each_us(plain, plan)}
    return [
        Ratio(
            f"engine {name}, {way}",
            seconds / plain,
            bound,
            details=facts | {"us per tensor": each_us(seconds, plan)},
        )
        for way, seconds, bound in measured
    ]


class LoadsWeights(Protocol):
    """A model of vLLM's."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load tensors under the names that they have in a checkpoint."""


@torch.no_grad()
def load_plainly(model: LoadsWeights, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    model.load_weights(tensors)


def each_us(seconds: float, plan: BucketPlan) -> float:
    return round(seconds / len(plan.specs) * 1e6, 1)


def config_of(name: str, layers: int | None) -> dict[str, Any]:
    from tests.support.manifests import CONFIGS

    return CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})


def tiny_config(name: str, layers: int | None) -> dict[str, Any]:
    from tests.support.manifests import TINY_SIZES

    return config_of(name, layers) | TINY_SIZES


def scaled_plan(name: str, layers: int | None) -> BucketPlan:
    """Return the plan of the tiny tensors, with about as many buckets as the large model has."""
    from megarl.weights.buckets import bucket_plan
    from tests.support.manifests import manifest_of

    tiny = manifest_of(tiny_config(name, layers), expert_parallel=EXPERT_PARALLEL, dtype="float32")
    return bucket_plan(tiny, scaled_bucket_bytes(name, layers), None)


def scaled_bucket_bytes(name: str, layers: int | None) -> int:
    """Return the bucket size of the tiny tensors that makes about as many buckets as the large model has."""
    from tests.support.manifests import manifest_of

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


if __name__ == "__main__":
    raise SystemExit(main())
