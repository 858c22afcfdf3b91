"""The records of the rollout journal: a JSON head, then arrays of numbers. Pure.

A finished group is one record, with everything but its trajectories' tokens in the head. An unfinished group is one
too, with the tokens of its responses so far and, in the head, the records of its agent loops. Log-probs are float32, as
in the queue. An `EpochRecord` begins each restart epoch.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec

from megarl.common.values import packed
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.trajectory import COLUMN_CODES, Trajectory, VersionSpan
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import FrozenLoop, PartialResponse, RequestPlace, UnfinishedGroup
from megarl.rollout.resume.lineage import Lineage, lineage_content, read_lineage

_HEAD = struct.Struct("<I")  # bytes of the head
_TEXTS = ("failure", "reward_error", "dataset")
_PLAIN = ("sample_index", "part", "finish_reason", "reward", "reward_components", "status", "demonstrated",
          "turn_rewards", "turn_starts", *_TEXTS)  # fmt: skip
_TOKENS = (("response_ids", "i"), ("logprobs", "f"))  # of an unfinished group
_ARRAYS = tuple(
    (name, COLUMN_CODES[name]) for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")
)


@dataclass(frozen=True)
class EpochRecord:
    """The lineage of the groups that follow, and digests, by name, of what their trajectories depend on."""

    lineage: Lineage
    identity: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the record."""
        head = {"kind": "epoch", "lineage": lineage_content(self.lineage), "identity": dict(self.identity)}
        return _join(head, [])

    @classmethod
    def of(cls, head: Mapping[str, Any]) -> EpochRecord:
        """Return the record of a head."""
        return cls(read_lineage(head["lineage"]), head["identity"])

    def changed(self, identity: Mapping[str, str]) -> list[str]:
        """Return the names of the digests that differ, sorted."""
        names = self.identity.keys() | identity.keys()
        return sorted(name for name in names if self.identity.get(name) != identity.get(name))


def encode_group(rows: Sequence[Trajectory], problem: str) -> bytes:
    """Return the record of a finished group; `problem`: the digest of its problem."""
    arrays: list[bytes] = []
    heads = []
    for row in rows:
        columns = [row.columns[name] for name, _ in _ARRAYS]
        columns += [packed("d", values) for values in row.streams.values()]
        heads.append(
            {name: getattr(row, name) for name in _PLAIN}
            | {
                "versions": _span_content(row.versions),
                "streams": list(row.streams),
                "lengths": [len(getattr(row, name)) for name, _ in _ARRAYS] + list(map(len, row.streams.values())),
            }
            | ({"images": [astuple(image) for image in row.images]} if row.images else {})
            | _form(row.routes)
        )
        arrays += columns if row.routes is None else [*columns, row.routes.tobytes()]
    files = {name: file for row in rows for name, file in row.files.items()}
    head = {"kind": "group", "group": rows[0].group_id, "problem": problem, "rows": heads}
    head |= {"files": {name: len(file) for name, file in files.items()}} if files else {}
    return _join(head, [*arrays, *files.values()])


def encode_unfinished(group: int, begun: UnfinishedGroup, problem: str) -> bytes:
    """Return the record of an unfinished group; `problem`: the digest of its problem."""
    heads = [
        {
            "place": place,
            "prompt": each.prompt,
            "finish_reason": each.tokens.finish_reason,
            "versions": _span_content(each.tokens.versions),
            "tokens": len(each.tokens.response_ids),
            **_form(each.tokens.routes),
        }
        for place, each in begun.responses.items()
    ]
    arrays: list[bytes] = []
    for each in begun.responses.values():
        arrays += [packed(kind, getattr(each.tokens, name)) for name, kind in _TOKENS]
        arrays += [] if each.tokens.routes is None else [each.tokens.routes.tobytes()]
    head = {"kind": "unfinished", "group": group, "problem": problem, "rows": heads}
    loops = b",".join(b"[%d,%s]" % (sample, loop.encoded()) for sample, loop in begun.loops.items())
    return _joined(_text(head)[:-1] + b',"loops":[' + loops + b"]}", arrays)


def decode_unfinished(record: bytes) -> UnfinishedGroup:
    """Return the progress in the record of an unfinished group."""
    head = read_head(record)
    (length,) = _HEAD.unpack_from(record)
    view = memoryview(record)[_HEAD.size + length :]
    begun: dict[RequestPlace, PartialResponse] = {}
    for row, versions in zip(head["rows"], spans_of(head), strict=True):
        columns: dict[str, Any] = {}
        for name, kind in _TOKENS:
            columns[name], view = _take(view, kind, row["tokens"])
        columns["routes"], view = _take_routes(view, row)
        sample, turn = row["place"]
        begun[sample, turn] = PartialResponse(
            row["prompt"], ResponsePart(**columns, versions=versions, finish_reason=row["finish_reason"])
        )
    return UnfinishedGroup(begun, {sample: FrozenLoop.of(content) for sample, content in head["loops"]})


def read_head(record: bytes) -> dict[str, Any]:
    """Return the head of a record."""
    (length,) = _HEAD.unpack_from(record)
    text = record[_HEAD.size : _HEAD.size + length]
    # A search for removable records reads all heads, so this must be fast. json.loads is slower, but also reads what
    # only Python writes: a non-finite reward, half a surrogate pair.
    try:
        head: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        head = json.loads(text)
    return head


def newest_version(head: Mapping[str, Any]) -> int:
    """Return the highest version among the tokens of a group; -1 if it has none."""
    return max((span.version for row in spans_of(head) for span in row), default=-1)


def spans_of(head: Mapping[str, Any]) -> list[tuple[VersionSpan, ...]]:
    """Return the version spans of each row of a group."""
    return [tuple(VersionSpan(*span) for span in row["versions"]) for row in head["rows"]]


def decode_group(record: bytes) -> list[Trajectory]:
    """Return the trajectories of a group's record."""
    head = read_head(record)
    (length,) = _HEAD.unpack_from(record)
    view, rows = memoryview(record)[_HEAD.size + length :], []
    for content, versions in zip(head["rows"], spans_of(head), strict=True):
        names = [name for name, _ in _ARRAYS] + content["streams"]
        kinds = [kind for _, kind in _ARRAYS] + ["d"] * len(content["streams"])
        columns: dict[str, Any] = {}
        for name, kind, count in zip(names, kinds, content["lengths"], strict=True):
            columns[name], view = _take(view, kind, count)
        routes, view = _take_routes(view, content)
        rows.append(
            Trajectory(
                group_id=head["group"],
                versions=versions,
                **{name: content[name] for name in _PLAIN if name in content},
                **{name: columns[name] for name, _ in _ARRAYS},
                streams={name: columns[name] for name in content["streams"]},
                images=tuple(ImageRef(*image) for image in content.get("images", ())),
                routes=routes,
            )
        )
    if "files" not in head:
        return rows
    files: dict[str, bytes] = {}
    for name, size in head["files"].items():
        files[name], view = bytes(view[:size]), view[size:]
    shown = [{image.hash: files[image.hash] for image in row.images if image.hash in files} for row in rows]
    return [replace(row, files=own) for row, own in zip(rows, shown, strict=True)]


def _take(view: memoryview, kind: str, count: int) -> tuple[list[Any], memoryview]:
    """Return the numbers at the beginning of a record's arrays, and what follows them."""
    column: array[Any] = array(kind)
    size = count * column.itemsize
    column.frombytes(view[:size])
    return column.tolist(), view[size:]


def _form(routes: Routes | None) -> dict[str, list[int]]:
    return {} if routes is None else {"routes": routes.form}


def _take_routes(view: memoryview, row: Mapping[str, Any]) -> tuple[Routes | None, memoryview]:
    """Return the experts at the beginning of a record's arrays, if the row has any, and what follows them."""
    if (form := row.get("routes")) is None:
        return None, view
    size = math.prod(form)
    return Routes.read(form, bytes(view[:size])), view[size:]


def _span_content(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [list(vars(span).values()) for span in spans]


def _join(head: Mapping[str, object], arrays: Sequence[bytes]) -> bytes:
    return _joined(_text(head), arrays)


def _text(head: Mapping[str, object]) -> bytes:
    return json.dumps(head, separators=(",", ":")).encode()


def _joined(text: bytes, arrays: Sequence[bytes]) -> bytes:
    return b"".join([_HEAD.pack(len(text)), text, *arrays])
