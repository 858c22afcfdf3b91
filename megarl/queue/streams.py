"""Per-token streams: named values beside the response tokens, one per token, each declared once.

A stream that the rollout side makes travels in `Trajectory.streams` through the queue and the dumps; one that the
trainer makes is added to its samples. From there on both go the same way: packed with the tokens, and given to the loss
under their names. A new stream needs its declaration and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.queue.trajectory import Trajectory

DType = Literal["float32", "int64", "bool"]


@dataclass(frozen=True)
class Stream:
    """A declaration. `made_by`: the side that produces it.

    `fill` stands for the tokens of a trajectory that lacks the stream, and for padding.
    """

    name: str
    meaning: str
    dtype: DType = "float32"
    made_by: Literal["rollout", "trainer"] = "rollout"
    fill: float = 0.0


class StreamRegistry:
    """Streams by name. Every process of a run imports the same declarations."""

    def __init__(self, *streams: Stream) -> None:
        self._streams: dict[str, Stream] = {}
        for stream in streams:
            self.declare(stream)

    def declare(self, stream: Stream) -> Stream:
        """Add a stream; the same declaration may be repeated. ValueError if another stream has the name."""
        known = self._streams.setdefault(stream.name, stream)
        if known != stream:
            raise ValueError(f"stream {stream.name!r} is declared already, and differently: {known}")
        return stream

    def __getitem__(self, name: str) -> Stream:
        """KeyError naming the declared streams for an unknown name."""
        if name not in self._streams:
            raise KeyError(f"stream {name!r} is not declared; declared are {', '.join(self._streams)}")
        return self._streams[name]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    @property
    def from_rollout(self) -> list[Stream]:
        """Those that travel through the queue, in the order of their declaration."""
        return [stream for stream in self if stream.made_by == "rollout"]


OLD_LOGPROBS = "old_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
ADVANTAGES = "advantages"

STREAMS = StreamRegistry(
    Stream(OLD_LOGPROBS, "Log-probs under the policy that the ratio of the update is against.", made_by="trainer"),
    Stream(REFERENCE_LOGPROBS, "Log-probs under the reference policy.", made_by="trainer"),
    Stream(ADVANTAGES, "Advantage of each token.", made_by="trainer"),
)


def stream_column(stream: Stream) -> str:
    """Name of a stream's column, which no field of a trajectory has."""
    return f"stream_{stream.name}"


def stream_row(stream: Stream, trajectory: Trajectory) -> list[float]:
    """A stream's values of one trajectory. ValueError if there is not one for each response token."""
    tokens = len(trajectory.response_ids)
    values = list(trajectory.streams.get(stream.name, [stream.fill] * tokens))
    if len(values) != tokens:
        raise ValueError(
            f"sample {trajectory.key}: stream {stream.name!r} has {len(values)} values for {tokens} response tokens"
        )
    return values
