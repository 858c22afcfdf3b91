"""The records of the journal hold trajectories and responses exactly."""

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import CallRecord, FrozenLoop, PartialResponse, RequestPlace, UnfinishedGroup
from megarl.rollout.resume.journal_records import (
    EpochRecord,
    decode_group,
    decode_unfinished,
    encode_group,
    encode_unfinished,
    newest_version,
    read_head,
)
from megarl.rollout.resume.lineage import INITIAL, next_epoch


@st.composite
def routes(draw: st.DrawFn) -> Routes | None:
    if draw(st.booleans()):
        return None
    shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 2)))
    numbers = np.arange(np.prod(shape)).reshape(shape) + draw(st.integers(0, 9))
    return Routes(numbers.astype(draw(st.sampled_from([np.uint8, np.uint16]))))


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory]:
    rows = []
    for index in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
        logprobs = array("f", draw(st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids)))).tolist()
        cut = draw(st.integers(0, len(ids)))
        spans = (VersionSpan(3, 0, cut), VersionSpan(7, cut, len(ids), lost=2, epoch=1)) if ids else ()
        streams = {"weights": [0.25 * token for token in range(len(ids))]} if draw(st.booleans()) else {}
        failed = draw(st.booleans())
        images = (ImageRef("ab", 1, 1, 2), ImageRef("cd", 3, 2, 1))[: draw(st.integers(0, 2))]
        rows.append(
            Trajectory(
                5,
                index,
                [1, 2, 3],
                ids,
                logprobs,
                spans,
                "stop",
                draw(st.floats(-2, 2)),
                {"format": 0.1},
                status="failed" if failed else "ok",
                failure="aborted" if failed else "",
                reward_error="late" if failed else "",
                streams=streams,
                response_mask=[token % 2 for token in range(len(ids))],
                dataset=draw(st.sampled_from(["", "näme"])),
                part=draw(st.integers(0, 3)),
                demonstrated=draw(st.booleans()),
                turn_rewards=[0.1, -2.0][: len(ids)],
                turn_starts=[0, 1][: len(ids)],
                images=images,
                files={image.hash: image.hash.encode() for image in images[draw(st.integers(0, 1)) :]},
                routes=draw(routes()),
            )
        )
    return rows


@settings(max_examples=60, deadline=None)
@given(rows=groups())
def test_a_group_is_read_as_it_was_written(rows: list[Trajectory]) -> None:
    record = encode_group(rows, "what was asked")
    assert decode_group(record) == rows
    # Once for the whole group, so a row may also have one that was a file of another one only.
    found, files = decode_group(record), {name: file for row in rows for name, file in row.files.items()}
    assert [row.files for row in found] == [
        {image.hash: files[image.hash] for image in row.images if image.hash in files} for row in rows
    ]
    head = read_head(record)
    assert (head["group"], head["problem"]) == (5, "what was asked")
    assert newest_version(head) == (7 if any(row.response_ids for row in rows) else -1)


def test_a_group_with_what_json_has_no_words_for_is_read_too() -> None:
    """A reward function may return infinity in a component, and an error may hold half of a surrogate pair."""
    row = Trajectory(
        5, 0, [1], [2], [-0.5], (VersionSpan(3, 0, 1),), "stop", 1.0, {"odd": float("inf")}, failure="\ud800"
    )
    record = encode_group([row], "asked")
    assert decode_group(record) == [row]
    assert read_head(record)["rows"][0]["reward_components"] == {"odd": float("inf")}


@st.composite
def responses(draw: st.DrawFn) -> PartialResponse:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    logprobs = array("f", draw(st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids)))).tolist()
    spans = (VersionSpan(3, 0, len(ids), lost=2, epoch=1),) if ids else ()
    end = draw(st.sampled_from([None, "stop", "length"]))
    return PartialResponse(draw(st.text(max_size=4)), ResponsePart(ids, logprobs, spans, end, routes=draw(routes())))


CALLS = st.builds(CallRecord, st.text(max_size=4), st.none() | st.text(max_size=4), st.booleans(), st.floats(0, 9))
LOOPS = st.builds(
    FrozenLoop, st.text(max_size=4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9),
    st.dictionaries(st.integers(0, 9), CALLS, max_size=3),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    begun=st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 3)), responses(), max_size=4),
    loops=st.dictionaries(st.integers(0, 9), LOOPS, max_size=3),
)
def test_an_unfinished_group_is_read_as_it_was_written(
    begun: dict[RequestPlace, PartialResponse], loops: dict[int, FrozenLoop]
) -> None:
    record = encode_unfinished(5, UnfinishedGroup(begun, loops), "what was asked")
    assert decode_unfinished(record) == UnfinishedGroup(begun, loops)
    head = read_head(record)
    assert (head["kind"], head["group"], head["problem"]) == ("unfinished", 5, "what was asked")
    assert newest_version(head) == (3 if any(each.tokens.response_ids for each in begun.values()) else -1)


def test_an_epoch_is_read_as_it_was_written() -> None:
    epoch = EpochRecord(next_epoch(INITIAL, 4), {"data": "a", "sampling": "b"})
    assert EpochRecord.of(read_head(epoch.encode())) == epoch
    assert epoch.changed({"data": "a", "sampling": "c", "reward": "d"}) == ["reward", "sampling"]
