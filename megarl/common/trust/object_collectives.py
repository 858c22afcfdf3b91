"""Collectives of small objects, which travel as MessagePack of a declared type. Nothing is unpickled.

torch's own object collectives unpickle what a socket delivers, and anyone who reaches a gloo socket could send it. Here
a value of the wrong form is refused before it is used. All ranks of a group call each function together. Each returns
what it has decoded, the sender too, so all ranks hold equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from megarl.common.errors import MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Codec(Generic[T]):
    """Turns the values of one type into bytes and back; `decode` returns nothing but a value of the type."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def codec_of(kind: Any) -> Codec[Any]:  # noqa: ANN401  # mypy has no type for expressions like `int | None` (TypeForm)
    """Return the codec of a type: None, numbers, text, bytes, paths, containers and dataclasses of these.

    Floats are exact, NaN and infinities included. Integers that are sent as floats arrive as floats. `decode` raises
    MalformedMessage for bytes that are no such value.
    """
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_read_path)

    def decode(content: bytes) -> Any:  # noqa: ANN401  # of `kind`
        try:
            return decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"a rank got a message that is no {kind}: {error}") from None

    return Codec(msgspec.msgpack.Encoder(enc_hook=_plain).encode, decode)


def sendable(text: str) -> str:
    """Return a text with "?" for what UTF-8 cannot represent, such as bytes of a path that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _plain(value: object) -> object:
    """Return a path or a number of numpy as a plain value. Raises TypeError for a type that MessagePack has not."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def _read_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{value!r} is no {kind}")


TEXT: Codec[str] = codec_of(str)
JSON: Codec[Any] = codec_of(Any)  # what JSON can represent; tuples arrive as lists


def broadcast(value: T | None, codec: Codec[T], source: int, group: ProcessGroup | None = None) -> T:
    """Return on every rank of the group the value of global rank `source`; the other ranks pass None."""
    import torch

    device = _device(group)
    mine = codec.encode(value) if torch.distributed.get_rank() == source else b""  # type: ignore[arg-type]
    size = torch.tensor([len(mine)], device=device)
    torch.distributed.broadcast(size, source, group=group)
    content = _tensor(mine, int(size), device)
    torch.distributed.broadcast(content, source, group=group)
    return codec.decode(_bytes(content))


def all_gather(value: T, codec: Codec[T], group: ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group, in rank order, on every rank."""
    import torch

    device = _device(group)
    mine = codec.encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    torch.distributed.all_gather(parts, _tensor(mine, longest, device), group=group)
    return [codec.decode(_bytes(part[: int(size)])) for part, size in zip(parts, sizes, strict=True)]


def _device(group: ProcessGroup | None) -> device:
    """Return the device whose tensors the group sends."""
    import torch

    nccl = "nccl" in str(torch.distributed.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _tensor(content: bytes, size: int, device: device) -> Tensor:
    """Return `size` bytes of which the first are `content`."""
    import torch

    return torch.frombuffer(bytearray(content.ljust(size, b"\0")) or bytearray(1), dtype=torch.uint8)[:size].to(device)


def _bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
