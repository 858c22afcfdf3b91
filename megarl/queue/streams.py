"""Per-token streams: named series with one value per response token, each declared once.

Streams of the rollout side travel in `Trajectory.streams` through the queue and the recorded batches; the trainer adds
its streams to its samples. Both are packed with the tokens and passed to the loss by name. A new stream needs only its
declaration.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.queue.trajectory import Trajectory

DType = Literal["float32", "int64", "bool"]


@dataclass(frozen=True)
class Stream:
    """The declaration of a stream; `made_by` is the side that produces it.

    `fill`: the value for trajectories without this stream, and for padding. `optional`: trajectories may lack it; it is
    then not transported, and packed for all samples if one of them has it.
    """

    name: str
    meaning: str
    dtype: DType = "float32"
    made_by: Literal["rollout", "trainer"] = "rollout"
    fill: float = 0.0
    optional: bool = False


class StreamRegistry:
    """The declared streams by name. Every process of a run imports the same declarations."""

    def __init__(self, *streams: Stream) -> None:
        self._streams: dict[str, Stream] = {}
        for stream in streams:
            self.declare(stream)

    def declare(self, stream: Stream) -> Stream:
        """Add a stream and return it. Raises ValueError if the name has a different declaration."""
        known = self._streams.setdefault(stream.name, stream)
        if known != stream:
            raise ValueError(f"stream {stream.name!r} is declared already: {known}; choose another name")
        return stream

    def __getitem__(self, name: str) -> Stream:
        """Return the stream `name`. Raises KeyError listing the declared streams if there is none."""
        if name not in self._streams:
            raise KeyError(f"stream {name!r} is not declared; declared are {', '.join(self._streams)}")
        return self._streams[name]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    @property
    def from_rollout(self) -> list[Stream]:
        """The streams that travel through the queue, in declaration order."""
        return [stream for stream in self if stream.made_by == "rollout"]


OLD_LOGPROBS = "old_logprobs"
ROLLOUT_LOGPROBS = "rollout_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
PROXIMAL_ALPHA = "proximal_alpha"
TEACHER_LOGPROBS = "teacher_logprobs"
ADVANTAGES = "advantages"
RL_WEIGHTS = "rl_weights"
CE_WEIGHTS = "ce_weights"
REF_KL_WEIGHTS = "ref_kl_weights"
SOURCES = "sources"

STREAMS = StreamRegistry(
    Stream(OLD_LOGPROBS, "Log-probs under the old policy, the denominator of the ratio.", made_by="trainer"),
    Stream(ROLLOUT_LOGPROBS, "Log-probs under the policy that sampled, for a correction.", made_by="trainer"),
    Stream(REFERENCE_LOGPROBS, "Log-probs under the reference policy.", made_by="trainer"),
    Stream(
        PROXIMAL_ALPHA,
        "Share of the current policy in the proximal one, where that is interpolated by version.",
        made_by="trainer",
        fill=1.0,
    ),
    Stream(TEACHER_LOGPROBS, "Log-probs under the teacher, by an engine or by the trainer.", optional=True),
    Stream(ADVANTAGES, "Advantage of each token.", made_by="trainer"),
    Stream(RL_WEIGHTS, "Weight of each sampled token in the policy loss.", fill=1.0, optional=True),
    Stream(CE_WEIGHTS, "Weight of each token in the cross-entropy.", fill=0.0, optional=True),
    Stream(REF_KL_WEIGHTS, "Weight of each sampled token in the KL to the reference.", fill=1.0, optional=True),
    Stream(SOURCES, "Bucket of the replica and the version lag of each token.", "int64", made_by="trainer"),
)


def stream_column(stream: Stream) -> str:
    """Return the name of a stream's column; it is not a field of a trajectory."""
    return f"stream_{stream.name}"


def stream_row(stream: Stream, trajectory: Trajectory) -> list[float]:
    """Return a stream's values for a trajectory, one per response token. Raises ValueError for another number."""
    tokens = len(trajectory.response_ids)
    convert = {"float32": float, "int64": int, "bool": bool}[stream.dtype]
    values = [convert(value) for value in trajectory.streams.get(stream.name, [stream.fill] * tokens)]
    if len(values) != tokens:
        raise ValueError(
            f"sample {trajectory.key}: stream {stream.name!r} has {len(values)} values for {tokens} response tokens"
        )
    return values
