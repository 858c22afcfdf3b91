"""The form in which a leader sends rows of the queue to the other ranks of its replica: the queue's own, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.common.errors import MalformedMessage
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.queue.row_format import COLUMN, decode, encode
from megarl.queue.trajectory import Trajectory


@dataclass(frozen=True)
class _Message:
    """Rows of the queue: the values of all rows, where each one begins and the last one ends, and the queue's tags."""

    values: bytes
    offsets: list[int]
    tags: list[dict[str, str]]


_MESSAGE: Codec[_Message] = codec_of(_Message)


def _encode(rows: Sequence[Trajectory]) -> bytes:
    if not rows:
        return _MESSAGE.encode(_Message(b"", [0], []))
    data, tags = encode(rows)
    column: Any = data[COLUMN]  # torch's types do not know the methods of nested tensors
    values, offsets = column.values().numpy().tobytes(), column.offsets().tolist()
    return _MESSAGE.encode(_Message(values, offsets, tags))


def _decode(content: bytes) -> list[Trajectory]:
    """Return the rows. Raises MalformedMessage if they are not the rows of the tags."""
    import torch
    from tensordict import TensorDict

    message = _MESSAGE.decode(content)
    offsets = message.offsets
    fits = len(offsets) == len(message.tags) + 1 and offsets[0] == 0 and offsets[-1] == len(message.values)
    if not fits or any(start >= end for start, end in pairwise(offsets)):
        raise MalformedMessage(
            f"a leader sent {len(message.tags)} rows of the queue in {len(message.values)} bytes, but rows cannot "
            f"begin and end at the bytes {offsets}"
        )
    if not message.tags:
        return []
    values = torch.frombuffer(bytearray(message.values), dtype=torch.uint8)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets))
    try:
        return decode(TensorDict({COLUMN: column}, batch_size=len(message.tags)), message.tags)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"a leader sent rows of the queue that cannot be read: {error!r}") from error


ROWS: Codec[list[Trajectory]] = Codec(_encode, _decode)
