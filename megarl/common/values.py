"""Small helpers for plain values: units, numbers as bytes, copies of records, the rows of a sample, JSON."""

import base64
import contextlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

# Binary units in bytes.

KIB = 2**10
MIB = 2**20
GIB = 2**30

FP32 = 4  # bytes of one number


def gib(size: float) -> str:
    """Return bytes as text in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


# The bytes of many numbers, as `array` has them.


def packed(code: str, values: Sequence[float]) -> bytes:
    """Return the bytes of `array(code, values)`, for lists in a third of its time: `array` parses value by value.

    Raises what `array` raises for values that do not fit.
    """
    if not isinstance(values, array):
        # `array` says what is wrong, or takes what is less strict, such as a float32 that is infinite.
        with contextlib.suppress(struct.error, OverflowError):
            return struct.pack(f"{len(values)}{code}", *values)
    numbers: array[Any] = array(code, values)
    return numbers.tobytes()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 2 steps, 2 processes."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def data_url_content(url: str, most: int) -> bytes:
    """Return the bytes of a data URL in base64. Raises ValueError for another URL, and for more than `most` bytes."""
    head, _, content = url.partition(",")
    if not (head.lower().startswith("data:") and head.lower().endswith(";base64")):
        raise ValueError("it must be a data URL in base64, data:image/png;base64,...")
    if len(content) > 4 * -(-most // 3):  # before it is decoded
        raise ValueError(f"it has more than {most:,} bytes")
    return base64.b64decode(content, validate=True)


# Copies of frozen dataclasses with other fields, for what is done several times per trajectory.

Copied = TypeVar("Copied")


def changed(one: Copied, **fields: object) -> Copied:
    """Return a copy of a dataclass with other `fields`, in a sixth of the time of `dataclasses.replace`.

    `replace` looks at every field and runs `__init__`, which in a frozen class calls `object.__setattr__` for each.
    This function runs nothing. Do not use it for classes with slots or cached properties, or for fields that
    `__post_init__` checks or uses. Raises TypeError for an unknown field.
    """
    copy = object.__new__(type(one))
    content = vars(copy)
    content.update(vars(one))
    before = len(content)
    content.update(fields)
    if len(content) != before:
        raise TypeError(f"{type(one).__name__} has no field {', '.join(fields.keys() - vars(one).keys())}")
    return copy


# The rows of a sample. An agent may make several of one sample, its parts, which share one reward. Pure.
#
# Part 0 stands for the sample wherever samples are counted. In every list of rows or tags the parts of a sample follow
# each other in their order.


class SamplePart(Protocol):
    """A row, or the tag of one."""

    @property
    def part(self) -> int:
        """The number of the row among those of its sample, from 0."""
        ...


P = TypeVar("P", bound=SamplePart)


def first_parts(rows: Iterable[P]) -> list[P]:
    """Return one row of each sample, in order."""
    return [row for row in rows if row.part == 0]


def by_sample(rows: Iterable[P]) -> list[list[P]]:
    """Return the rows of each sample, in order. Raises ValueError if a sample does not begin with its part 0."""
    samples: list[list[P]] = []
    for row in rows:
        if row.part == 0:
            samples.append([row])
        elif samples and row.part == len(samples[-1]):
            samples[-1].append(row)
        else:
            raise ValueError(f"part {row.part} of a sample does not follow the part before it")
    return samples


# `json.loads` declares no other type: with a union of the possible ones every reader would have to narrow it first.
JsonValue: TypeAlias = Any


def leaves(value: JsonValue, key: str = "", *, lists: bool = True) -> Iterator[tuple[str, JsonValue]]:
    """Yield (dotted key, value) of everything in nested mappings that is none, or is empty; `lists`: in lists too."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if lists and isinstance(value, list | tuple) else []
    if not items:
        yield key, value
    for name, inner in items:
        yield from leaves(inner, f"{key}.{name}" if key else str(name), lists=lists)
