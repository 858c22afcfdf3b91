"""Converts trajectories to rows of the trajectory queue and back: one column of bytes, and a tag of scalars as JSON.

All numbers of a trajectory share one column, because TransferQueue (0.1.11) works per row and column, whatever their
size. A row is a head of four int64 (prompt tokens, response tokens, values of the version spans, and a bit per optional
stream), then the values of `_layout` in native byte order.

Shapes: B bytes of all rows.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.common.values import packed
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.streams import STREAMS, Stream, stream_row
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

COLUMN = "trajectory"
TAG = "tag"
_HEAD = 4  # numbers in a row's head
_FIELDS = ("prompt_ids", "response_ids", "rollout_logprobs", "response_mask")  # stored unchanged
_TEXTS = ("failure", "reward_error")  # in the tags, but like images not in `SampleTag`
_ROUTES = "routes"  # in the tags of rows that end with their experts: `Routes.form`
_IMAGES = "images"  # in the tags of rows with images: hash, offset, height and width of each
_SCALARS = (
    "group_id", "sample_index", "finish_reason", "reward", "reward_components", "status", *_TEXTS, "dataset", "part",
    "demonstrated", "turn_rewards", "turn_starts",
)  # fmt: skip
_SPAN = 6  # version, start, end, lost, epoch, replica
_CODES = {"int64": "q", "float32": "f", "bool": "b"}  # of `array`, by the dtype of a stream


Row: TypeAlias = "tuple[bytes, dict[str, str]]"  # content and tag


def encode_row(trajectory: Trajectory) -> Row:
    """Return the row of a trajectory."""
    return _content_of(trajectory), _tag(trajectory)


def encode_file(content: bytes) -> Row:
    """Return the row of an image's file, with an empty tag."""
    return content, {TAG: "{}"}


def encode(trajectories: Sequence[Trajectory]) -> tuple[TensorDict, list[dict[str, str]]]:
    """Return (TensorDict of one jagged uint8 column, tags), one row per trajectory.

    Token ids are int32, masks int8, log-probs float32 and bitwise equal to the engine's.
    """
    return join_rows([encode_row(trajectory) for trajectory in trajectories])


def join_rows(encoded: Collection[Row]) -> tuple[TensorDict, list[dict[str, str]]]:
    """Return what `encode` returns, for encoded rows."""
    import torch
    from tensordict import TensorDict

    rows = [content for content, _ in encoded]
    # One tensor for all rows: a tensor per row takes six times as long.
    values_B = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    offsets = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64)
    column = torch.nested.nested_tensor_from_jagged(values_B, offsets)
    return TensorDict({COLUMN: column}, batch_size=len(rows)), [tag for _, tag in encoded]


def _layout(head: Sequence[int], streams: Sequence[Stream]) -> list[tuple[str, str, int]]:
    """Return (name, code of `array`, number of values) of the parts of a row after its head."""
    prompt, response, spans, _ = head
    return [
        ("versions", "q", spans),
        ("prompt_ids", "i", prompt),
        ("response_ids", "i", response),
        ("rollout_logprobs", "f", response),
        ("response_mask", "b", response),
        *((stream.name, _CODES[stream.dtype], response) for stream in streams),
    ]


def _declared() -> tuple[list[Stream], list[Stream]]:
    """Return the streams that every row has, and the optional ones, sorted: the order of declaration may differ."""
    known = sorted(STREAMS.from_rollout, key=lambda stream: stream.name)
    return [stream for stream in known if not stream.optional], [stream for stream in known if stream.optional]


def _streams(bits: int) -> list[Stream]:
    """Return the streams of a row with these bits in its head."""
    always, optional = _declared()
    return always + [stream for place, stream in enumerate(optional) if bits >> place & 1]


def _content_of(trajectory: Trajectory) -> bytes:
    bits = sum(1 << place for place, stream in enumerate(_declared()[1]) if stream.name in trajectory.streams)
    streams = _streams(bits)
    values: dict[str, Sequence[float]] = {stream.name: stream_row(stream, trajectory) for stream in streams}
    values["versions"] = [
        n for s in trajectory.versions for n in (s.version, s.start, s.end, s.lost, s.epoch, s.replica)
    ]
    lengths = (len(trajectory.prompt_ids), len(trajectory.response_ids), len(values["versions"]))
    head, columns = array("q", [*lengths, bits]), trajectory.columns
    parts = [
        columns[name] if name in columns else packed(code, values[name]) for name, code, _ in _layout(head, streams)
    ]
    experts = [] if trajectory.routes is None else [trajectory.routes.tobytes()]
    return b"".join([head.tobytes(), *parts, *experts])


def _tag(trajectory: Trajectory) -> dict[str, str]:
    # One string, because the library deep-copies each value of a tag three times. Not `asdict`, which would copy every
    # field recursively.
    images = {_IMAGES: [astuple(image) for image in trajectory.images]} if trajectory.images else {}
    routes = {} if trajectory.routes is None else {_ROUTES: trajectory.routes.form}
    texts = {name: getattr(trajectory, name) for name in _TEXTS}
    return {TAG: json.dumps(vars(trajectory.tag) | texts | images | routes)}


def _content(tag: Mapping[str, str]) -> dict[str, Any]:
    content = json.loads(tag[TAG])
    if not isinstance(content, dict):
        raise ValueError(f"the tag of a row is not an object: {content!r:.60}")
    return content


def decode_tag(tag: Mapping[str, str]) -> SampleTag:
    """Return the tag of one row."""
    return SampleTag(
        **{name: value for name, value in _content(tag).items() if name not in (*_TEXTS, _IMAGES, _ROUTES)}
    )


def decode(data: TensorDict, tags: Sequence[Mapping[str, str]]) -> list[Trajectory]:
    """Return the trajectories of `encode`'s column and tags. Raises ValueError for a row that `encode` did not make."""
    trajectories = []
    for row, tag in zip(_rows(data[COLUMN]), map(_content, tags), strict=True):
        form = tag.get(_ROUTES)
        end = len(row) - (math.prod(form) if form else 0)
        values, routes = _values(row[:end], tag["key"]), Routes.read(form, bytes(row[end:])) if form else None
        flat = values["versions"]
        spans = tuple(VersionSpan(*flat[start : start + _SPAN]) for start in range(0, len(flat), _SPAN))
        own = {name: values[name] for name in _FIELDS} | {name: tag[name] for name in _SCALARS}
        streams = {stream.name: values[stream.name] for stream in STREAMS.from_rollout if stream.name in values}
        images = tuple(ImageRef(*image) for image in tag.get(_IMAGES, ()))
        trajectories.append(Trajectory(versions=spans, streams=streams, images=images, routes=routes, **own))
    return trajectories


def files_of(data: TensorDict) -> list[bytes]:
    """Return the files in a column of `encode_file` rows."""
    return [bytes(row) for row in _rows(data[COLUMN])]


def _values(row: memoryview, key: str) -> dict[str, list[Any]]:  # of int, float or bool, by the part
    """Return the parts of a row by name."""
    head, start = array("q"), _HEAD * 8
    head.frombytes(row[:start])
    streams = _streams(head[-1])
    layout = _layout(head, streams)
    parts = [array(code) for _, code, _ in layout]
    needed = start + sum(count * part.itemsize for (*_, count), part in zip(layout, parts, strict=True))
    if needed != len(row) or head[2] % _SPAN:
        raise ValueError(
            f"the row of sample {key} has {len(row)} bytes, but its head {head.tolist()} needs {needed} and spans of "
            f"{_SPAN} values; or this process declares other streams: {[stream.name for stream in streams]}"
        )
    values: dict[str, list[Any]] = {}
    for (name, _, count), part in zip(layout, parts, strict=True):
        end = start + count * part.itemsize
        part.frombytes(row[start:end])
        values[name], start = part.tolist(), end
    for stream in streams:
        if stream.dtype == "bool":
            values[stream.name] = [bool(value) for value in values[stream.name]]
    return values


def _rows(column: torch.Tensor) -> list[memoryview]:
    """Return the bytes of each row. The library returns a dense tensor if all rows are equally long."""
    if not column.is_nested:
        return [memoryview(row.numpy()) for row in column.contiguous()]
    jagged: Any = column  # torch's types do not know the methods of nested tensors
    values, offsets = memoryview(jagged.values().numpy()), jagged.offsets().tolist()
    return [values[start:end] for start, end in pairwise(offsets)]
