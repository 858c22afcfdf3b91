"""Writes a run's batches to disk and reads them back, for `megarl replay` and for analysis after a run.

A step is one or more Parquet files `step_000012.0-of-1.parquet`, one per writer (a DP leader writes the rows that it
fetched). A file has one row per trajectory and unpadded list columns, which pandas and DuckDB read directly. Parts
appear atomically; a step is valid only if all its parts exist. Log-probs are float32, as in the engine, so the round
trip is exact; rewards and reward components are float64. Image files are in the directory `images`, each once, named by
its hash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.common.files import replace_file
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.streams import STREAMS, stream_column, stream_row
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "7"
# Format 2 added masks and streams (before, all response tokens are sampled), 3 tokens of lost updates, 4 several
# trajectories per sample, 5 replicas, 6 images, 7 experts to replay.
READABLE = ("1", "2", "3", "4", "5", "6", FORMAT)
_PART = re.compile(r"step_(\d{6,})\.(\d+)-of-(\d+)\.parquet")


class DumpError(ValueError):
    """A recorded batch is missing, incomplete or unreadable; the message names the file."""


@dataclass(frozen=True)
class DumpedBatch:
    """One step's batch, sorted by (group, sample, part); `version`: of the weights at the start of the step."""

    step: int
    version: int
    trajectories: list[Trajectory]

    @property
    def tags(self) -> list[SampleTag]:
        """The tags that every rank read, in the order of `trajectories`."""
        return [trajectory.tag for trajectory in self.trajectories]


def write_batch(
    directory: Path,
    step: int,
    version: int,
    trajectories: Sequence[Trajectory],
    *,
    part: int = 0,
    parts: int = 1,
) -> Path:
    """Write one part of a step's batch atomically (fsync, then rename); return the file.

    Several writers each pass a different `part` of `parts`. Parts without rows must be written too, because a step is
    valid only with all its parts. Image files of the trajectories are written first. Raises OSError if a file cannot be
    written, ValueError unless 0 <= part < parts.
    """
    import pyarrow.parquet as pq

    if not 0 <= part < parts:
        raise ValueError(f"batch dump: part {part} of {parts} does not exist")
    directory.mkdir(parents=True, exist_ok=True)
    for trajectory in trajectories:
        for name, content in trajectory.files.items():
            if not (image := _image_path(directory, name)).exists():
                image.parent.mkdir(exist_ok=True)
                replace_file(image, content)
    path = directory / f"step_{step:06d}.{part}-of-{parts}.parquet"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(_to_table(step, version, trajectories), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for (_, total), stale in _parts(directory).get(step, {}).items():
        if total != parts:  # from an earlier attempt with another number of writers
            stale.unlink(missing_ok=True)
    return path


def read_batch(directory: Path, step: int) -> DumpedBatch:
    """Read all parts of a step. Raises DumpError if a part is missing or damaged, or a sample occurs twice."""
    found = _parts(directory).get(step, {})
    if not found:
        raise DumpError(f"{directory}: no batch of step {step} was recorded (telemetry.dump_batches=true records them)")
    totals = {total for _, total in found}
    if len(totals) != 1 or len(found) != max(totals):
        raise DumpError(f"{directory}: step {step} is incomplete, it has only {sorted(p.name for p in found.values())}")
    version: int | None = None
    rows: dict[str, Trajectory] = {}
    for path in found.values():
        part_version, trajectories = _read_part(path, step)
        if version is not None and part_version != version:
            raise DumpError(f"{path}: weight version {part_version}, but other parts of the step have {version}")
        version = part_version
        for trajectory in trajectories:
            if trajectory.key in rows:
                raise DumpError(f"{path}: sample {trajectory.key} is recorded twice in step {step}")
            rows[trajectory.key] = trajectory
    assert version is not None
    ordered = sorted(rows.values(), key=lambda row: (row.group_id, row.sample_index, row.part))
    return DumpedBatch(step, version, ordered)


def read_images(directory: Path, rows: Iterable[Trajectory]) -> dict[str, bytes]:
    """Return the files of the images of recorded rows by hash. Raises DumpError if one is missing."""
    names = {image.hash for row in rows for image in row.images}
    try:
        return {name: _image_path(directory, name).read_bytes() for name in names}
    except OSError as error:
        raise DumpError(
            f"{directory}: a file of an image of its rows is missing: {error}; copy the run's images/ to it, or record "
            "the batches again (earlier releases did not keep image files)"
        ) from error


def _image_path(directory: Path, name: str) -> Path:
    if not name.isalnum():
        raise DumpError(f"{directory}: {name!r} is no hash of an image")
    return directory / "images" / name


def recorded_steps(directory: Path) -> list[int]:
    """Return the steps with all parts, ascending; [] if the directory does not exist."""
    steps = []
    for step, found in _parts(directory).items():
        totals = {total for _, total in found}
        if len(totals) == 1 and len(found) == max(totals):
            steps.append(step)
    return sorted(steps)


def _parts(directory: Path) -> dict[int, dict[tuple[int, int], Path]]:
    """Return the recorded files as step -> (part, number of parts) -> path."""
    steps: dict[int, dict[tuple[int, int], Path]] = {}
    for path in sorted(directory.glob("step_*.parquet")):
        if match := _PART.fullmatch(path.name):
            step, part, total = map(int, match.groups())
            steps.setdefault(step, {})[part, total] = path
    return steps


# The columns that are fields of a trajectory, with type names; a list holds its element type.
_PLAIN: dict[str, str | list[str]] = {
    "group_id": "int64",
    "sample_index": "int32",
    "part": "int32",
    "prompt_ids": ["int32"],
    "response_ids": ["int32"],
    "response_mask": ["int8"],
    "rollout_logprobs": ["float32"],
    "finish_reason": "string",
    "reward": "float64",
    "status": "string",
    "failure": "string",
    "reward_error": "string",
    "dataset": "string",
    "demonstrated": "bool_",
    "turn_rewards": ["float64"],
    "turn_starts": ["int32"],
}


def _schema() -> pa.Schema:
    import pyarrow as pa

    span = pa.struct([(name, pa.int64()) for name in ("version", "start", "end", "lost", "epoch", "replica")])
    component = pa.struct([("name", pa.string()), ("value", pa.float64())])
    image = pa.struct([("hash", pa.string()), *((name, pa.int32()) for name in ("offset", "height", "width"))])
    return pa.schema(
        [
            *((name, _arrow_type(kind)) for name, kind in _PLAIN.items()),
            ("versions", pa.list_(span)),
            ("reward_components", pa.list_(component)),
            ("images", pa.list_(image)),
            ("routes", pa.struct([("form", pa.list_(pa.int64())), ("content", pa.binary())])),
            *((stream_column(stream), _arrow_type([_STREAM_TYPES[stream.dtype]])) for stream in STREAMS.from_rollout),
        ]
    )


_STREAM_TYPES = {"float32": "float32", "int64": "int64", "bool": "bool_"}


def _arrow_type(kind: str | list[str]) -> pa.DataType:
    import pyarrow as pa

    made: pa.DataType = pa.list_(getattr(pa, kind[0])()) if isinstance(kind, list) else getattr(pa, kind)()
    return made


def _to_table(step: int, version: int, trajectories: Sequence[Trajectory]) -> pa.Table:
    import pyarrow as pa

    rows = [
        {
            **{name: getattr(trajectory, name) for name in _PLAIN},
            "versions": [vars(span) for span in trajectory.versions],
            "reward_components": [
                {"name": name, "value": value} for name, value in trajectory.reward_components.items()
            ],
            "images": [vars(image) for image in trajectory.images],
            "routes": None
            if (routes := trajectory.routes) is None
            else {"form": routes.form, "content": routes.tobytes()},
            **{
                stream_column(stream): stream_row(stream, trajectory)
                for stream in STREAMS.from_rollout
                if not stream.optional or stream.name in trajectory.streams
            },
        }
        for trajectory in trajectories
    ]
    metadata = {"megarl.format": FORMAT, "megarl.step": str(step), "megarl.version": str(version)}
    return pa.Table.from_pylist(rows, schema=_schema().with_metadata(metadata))


def _read_part(path: Path, step: int) -> tuple[int, list[Trajectory]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DumpError(f"{path}: not a readable batch dump ({error})") from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if metadata.get("megarl.format") not in READABLE:
        raise DumpError(
            f"{path}: not a batch dump of format {', '.join(READABLE)} (found {metadata.get('megarl.format')!r})"
        )
    if metadata["megarl.step"] != str(step):
        raise DumpError(f"{path}: holds step {metadata['megarl.step']}, its name says {step}")
    return int(metadata["megarl.version"]), [_from_row(row) for row in table.to_pylist()]


def _from_row(row: dict[str, Any]) -> Trajectory:
    routes = row.get("routes")
    return Trajectory(
        **{name: row[name] for name in _PLAIN if name in row},
        versions=tuple(VersionSpan(**span) for span in row["versions"]),
        reward_components={item["name"]: item["value"] for item in row["reward_components"]},
        images=tuple(ImageRef(**image) for image in row.get("images", ())),
        routes=None if routes is None else Routes.read(routes["form"], routes["content"]),
        streams={
            stream.name: values
            for stream in STREAMS.from_rollout
            if (values := row.get(stream_column(stream))) is not None
        },
    )
