"""Compares two model directories tensor by tensor, and describes one in a table."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.checkpoint.convert.job import size
from megarl.checkpoint.convert.workers import split
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.checkpoint.format.shard_index import load_plain
from megarl.common.files import inside
from megarl.models.hf.directory import HFDirectory, HFTensors, left_out_note, listed
from megarl.models.hf.model_files import COMMON_FILE


def describe(model: HFDirectory | MegatronDirectory) -> str:
    """Return a table of family, parameters, dtypes, layers, experts, shards and sizes, one fact per line."""
    info, names = model.info, model.names()
    counts: Counter[torch.dtype] = Counter()
    for name in names:
        counts[model.dtype(name)] += torch.Size(model.shape(name)).numel()
    experts = f", {sum(info.moe_layers)} of them with {info.num_experts} experts" if info.num_experts else ""
    files = [path for path in model.files() if path.suffix in (".safetensors", ".bin", ".distcp")]
    rows = [
        ("path", str(model.path)),
        ("format", _format(model)),
        ("family", f"{info.family} ({', '.join(info.raw.get('architectures') or [])})"),
        ("parameters", f"{sum(counts.values()):,}"),
        *([("quantised", str(model.quantization))] if isinstance(model, HFDirectory) and model.quantization else []),
        ("dtypes", ", ".join(f"{str(d).removeprefix('torch.')} {n:,}" for d, n in counts.most_common())),
        ("layers", f"{info.num_layers}{experts}"),
        ("hidden, vocabulary", f"{info.hidden:,}, {info.vocab_size:,}{' (tied)' if info.tied else ''}"),
        ("tensors", _tensors(model)),
        *([("left out", note.removeprefix("left out: "))] if (note := _left_out(model)) else []),
        ("weights", size(sum(dtype.itemsize * count for dtype, count in counts.items()))),
        ("shards", f"{len(files)}, {size(sum(path.stat().st_size for path in files))}"),
        *((f"  {path.name}", size(path.stat().st_size)) for path in files),
    ]
    width = max(len(title) for title, _ in rows)
    return "".join(f"{title:<{width}}  {value}\n" for title, value in rows)


def _format(model: HFDirectory | MegatronDirectory) -> str:
    if isinstance(model, HFDirectory):
        return "Hugging Face"
    metadata = content_metadata_of(model.step)
    scheme = f"scheme {metadata.get('megarl_scheme', 'unknown')}"
    return f"Megatron-Core torch_dist, {model.step.name}, {scheme}"


def content_metadata_of(step: Path) -> dict[str, object]:
    """Return the content metadata in `common.pt`, {} if it has none. Raises ValueError if it is not plain data."""
    path = inside(step, COMMON_FILE)
    try:
        common = load_plain(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except ValueError as error:  # other objects, whose code must not run here
        raise ValueError(f"{path} cannot be read as plain data: {error}") from error
    found: dict[str, object] = common.get("content_metadata") or {}
    return found


def _left_out(model: HFDirectory | MegatronDirectory) -> str:
    return left_out_note(model.left_out, model.info) if isinstance(model, HFDirectory) else ""


def _tensors(model: HFDirectory | MegatronDirectory) -> str:
    if isinstance(model, HFDirectory):
        return f"{len(model.names()):,}"
    keys = f"{len(model.names()):,} as Hugging Face tensors, {len(model.index):,} keys"
    own = sum(key.startswith("optimizer.") for key in model.index)
    return f"{keys}, {own:,} of them of the optimizer" if own else f"{keys}, none of an optimizer"


@dataclass
class Comparison:
    """The outcome by Hugging Face name. Bitwise equal tensors and buffers of equal values are counted, others listed.

    `missing`: only in the first model; `unexpected`: only in the second.
    """

    equal: int = 0
    differing: list[tuple[str, float]] = field(default_factory=list)  # max |Δ|
    mismatched: list[str] = field(default_factory=list)  # shape or dtype
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # a line per directory with parts that are not compared

    @property
    def same(self) -> bool:
        """True if all compared tensors are equal."""
        return not (self.differing or self.mismatched or self.missing or self.unexpected)

    def render(self) -> str:
        """Return one line of counts, then a line per difference."""
        lines = [
            f"{self.equal:,} equal, {len(self.differing):,} differing, {len(self.mismatched):,} of another shape or "
            f"dtype, {len(self.missing):,} missing, {len(self.unexpected):,} unexpected"
        ]
        worst = sorted(self.differing, key=lambda pair: -math.inf if math.isnan(pair[1]) else -pair[1])
        lines += listed("differing (max |Δ|)", [f"{name}  {delta:.3e}" for name, delta in worst])
        lines += listed("another shape or dtype", self.mismatched)
        lines += listed("missing (only in A)", self.missing) + listed("unexpected (only in B)", self.unexpected)
        return "\n".join(lines + self.left_out) + "\n"


def compare(one: HFTensors, other: HFTensors, report: Callable[[int], None] = lambda count: None) -> Comparison:
    """Compare all tensors of both models, in blocks of rows. `report` is called with the bytes of each block."""
    names, own, others = one.names(), set(one.names()), set(other.names())
    result = Comparison(missing=[name for name in names if name not in others])
    result.unexpected = [name for name in other.names() if name not in own]
    # Checkpoints store these in fp32, whatever dtype the files have, so only their values are compared.
    wide = {name for entry in one.entries.values() if entry.rule.stays_fp32 for name in entry.names}
    for model in (one, other):
        if isinstance(model, HFDirectory) and model.left_out:
            result.left_out.append(f"{model.path}: {left_out_note(model.left_out, model.info)}")
    for name in names:
        if name not in others:
            continue
        kinds = [f"{list(model.shape(name))} {str(model.dtype(name))[6:]}" for model in (one, other)]
        if one.shape(name) != other.shape(name):
            result.mismatched.append(f"{name}: {kinds[0]} and {kinds[1]}")
            continue
        deltas = list(_deltas(one, other, name, report))
        if one.dtype(name) != other.dtype(name) and not (name in wide and not any(deltas)):
            result.mismatched.append(f"{name}: {kinds[0]} and {kinds[1]}, max |Δ| {_worst(deltas):.3e}")
        elif any(deltas):
            result.differing.append((name, _worst(deltas)))
        else:
            result.equal += 1
    return result


def _deltas(one: HFTensors, other: HFTensors, name: str, report: Callable[[int], None]) -> Iterator[float]:
    """Yield max |Δ| of each block of rows: 0 only for equal bits, NaN for equal values with different bits (NaN
    payloads, signs of zero).
    """
    for item in split(name, one.shape(name), one.dtype(name)):
        a, b = (model.rows(name, item.start, item.stop) for model in (one, other))
        report(item.nbytes)
        if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            yield 0.0
            continue
        delta = float((a.double() - b.double()).abs().max())
        yield delta if delta or a.dtype != b.dtype else float("nan")


def _worst(deltas: list[float]) -> float:
    """Return the largest delta, NaN if any is NaN (unlike `max`), 0 for a tensor without elements."""
    return math.nan if any(map(math.isnan, deltas)) else max(deltas, default=0.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor`, uint8 [B]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
