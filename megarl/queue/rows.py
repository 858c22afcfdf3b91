"""Converts trajectories to rows of the trajectory queue and back: columns of tensors, and tags of scalars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from megarl.queue.streams import STREAMS, stream_column, stream_row
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "versions")


def encode(trajectories: Sequence[Trajectory]) -> tuple[TensorDict, list[dict[str, Any]]]:
    """Return (TensorDict of jagged columns, tags), one row per trajectory.

    Token ids and versions are int64, masks int8, log-probs float32 and bitwise equal to the engine's.
    """
    import numpy as np
    import torch
    from tensordict import TensorDict

    def jagged(rows: Sequence[Sequence[float]], dtype: str) -> torch.Tensor:
        # One tensor for all rows, because a tensor per row takes six times as long; and NumPy reads numbers of Python
        # seven times as fast as torch.
        offsets = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64)
        values = torch.empty(int(offsets[-1]), dtype=getattr(torch, dtype))
        # Copied, because torch gives an empty array of NumPy the stride 0, which the library refuses to send.
        values.numpy()[:] = np.fromiter(chain.from_iterable(rows), dtype, count=len(values))
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    spans = [[n for s in t.versions for n in (s.version, s.start, s.end, s.lost, s.epoch)] for t in trajectories]
    columns = {
        "prompt_ids": jagged([t.prompt_ids for t in trajectories], "int64"),
        "response_ids": jagged([t.response_ids for t in trajectories], "int64"),
        "response_mask": jagged([t.response_mask for t in trajectories], "int8"),
        "rollout_logprobs": jagged([t.rollout_logprobs for t in trajectories], "float32"),
        "versions": jagged(spans, "int64"),
    }
    for stream in STREAMS.from_rollout:
        rows = [stream_row(stream, trajectory) for trajectory in trajectories]
        columns[stream_column(stream)] = jagged(rows, stream.dtype)
    return TensorDict(columns, batch_size=len(trajectories)), [_tag(trajectory) for trajectory in trajectories]


def _tag(trajectory: Trajectory) -> dict[str, Any]:
    # `asdict` would copy every value of every field recursively; the tag's only container is a copy already.
    return vars(trajectory.tag) | {"failure": trajectory.failure}


def decode_tag(tag: dict[str, Any]) -> SampleTag:
    """Return the tag of one row."""
    return SampleTag(**{name: value for name, value in tag.items() if name != "failure"})


def decode(data: TensorDict, tags: Sequence[dict[str, Any]]) -> list[Trajectory]:
    """Return the trajectories of `encode`'s columns and tags."""
    columns = {name: _rows(data[name]) for name in COLUMNS}
    streams = {stream.name: _rows(data[stream_column(stream)]) for stream in STREAMS.from_rollout}
    trajectories = []
    for index, tag in enumerate(tags):
        flat = columns["versions"][index]
        spans = tuple(VersionSpan(*flat[start : start + 5]) for start in range(0, len(flat), 5))
        trajectories.append(
            Trajectory(
                group_id=tag["group_id"],
                sample_index=tag["sample_index"],
                prompt_ids=columns["prompt_ids"][index],
                response_ids=columns["response_ids"][index],
                rollout_logprobs=columns["rollout_logprobs"][index],
                versions=spans,
                finish_reason=tag["finish_reason"],
                reward=tag["reward"],
                reward_components=tag["reward_components"],
                status=tag["status"],
                failure=tag["failure"],
                response_mask=columns["response_mask"][index],
                streams={name: rows[index] for name, rows in streams.items()},
                dataset=tag["dataset"],
            )
        )
    return trajectories


def _rows(column: torch.Tensor) -> list[list[Any]]:  # of int or float, by the dtype of the column
    """Return the rows of a column as lists. The library returns a dense tensor if all rows have the same length."""
    if not column.is_nested:
        rows: list[list[Any]] = column.tolist()
        return rows
    values, offsets = column.values().tolist(), column.offsets().tolist()  # type: ignore[attr-defined]
    return [values[start:end] for start, end in pairwise(offsets)]
