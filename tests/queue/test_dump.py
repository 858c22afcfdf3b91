"""Batch dumps and samples.jsonl: exact round trips, atomic parts, clear messages for damage."""

import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.queue import row_format
from megarl.queue.dump import DumpError, read_batch, read_images, recorded_steps, write_batch
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.sample_lines import choose_keys, sample_record
from megarl.queue.trajectory import Trajectory, VersionSpan


def make(group: int, index: int, **changes) -> Trajectory:
    logprob = struct.unpack("f", struct.pack("f", -0.1 * (index + 1)))[0]
    base = Trajectory(
        group_id=group,
        sample_index=index,
        prompt_ids=[5, 6, 7 + group],
        response_ids=[8, 9],
        rollout_logprobs=[logprob, -9999.0],
        versions=(VersionSpan(0, 0, 1), VersionSpan(3, 1, 2)),
        finish_reason="stop",
        reward=1 / 3,
        reward_components={"accuracy": 0.1, "format": 1.0},
    )
    return replace(base, **changes)


float32 = st.floats(width=32, allow_nan=False)
trajectories = st.builds(
    Trajectory,
    group_id=st.integers(0, 2**40),
    sample_index=st.integers(0, 64),
    prompt_ids=st.lists(st.integers(0, 300_000), max_size=5),
    response_ids=st.lists(st.integers(0, 300_000), max_size=5),
    rollout_logprobs=st.lists(float32, max_size=5),
    versions=st.lists(
        st.builds(VersionSpan, version=st.integers(0, 9), start=st.integers(0, 9), end=st.integers(0, 9)),
        max_size=3,
    ).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    reward=st.floats(allow_nan=False),
    reward_components=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=2),
    status=st.sampled_from(["ok", "failed"]),
    failure=st.text(max_size=5),
    reward_error=st.text(max_size=5),
    dataset=st.text(max_size=5),
    part=st.integers(0, 12),
    images=st.lists(
        st.builds(ImageRef, st.text(max_size=4), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)), max_size=2
    ).map(tuple),
    routes=st.none() | st.builds(
        lambda tokens, kind: Routes(np.arange(tokens * 6, dtype=kind).reshape(tokens, 3, 2)),
        st.integers(0, 3), st.sampled_from(["u1", "u2"]),
    ),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(trajectories, max_size=4, unique_by=lambda each: each.key), step=st.integers(0, 10**7))
def test_round_trip_is_exact(tmp_path, batch, step):
    write_batch(tmp_path, step, 7, batch)
    read = read_batch(tmp_path, step)
    assert (read.step, read.version) == (step, 7)
    assert read.trajectories == sorted(batch, key=lambda each: (each.group_id, each.sample_index, each.part))
    assert read.tags == [each.tag for each in read.trajectories]


def test_files_of_images_are_kept_once(tmp_path):
    contents = {"ab12": b"first", "cd34": b"second"}
    refs = {name: ImageRef(name, place, 1, 1) for place, name in enumerate(contents)}
    both = make(0, 0, images=tuple(refs.values()), files=contents)
    one = make(1, 0, images=(refs["ab12"],), files={"ab12": b"first"})
    write_batch(tmp_path, 0, 0, [both], part=0, parts=2)
    write_batch(tmp_path, 0, 0, [one], part=1, parts=2)
    rows = read_batch(tmp_path, 0).trajectories
    assert read_images(tmp_path, rows) == contents and read_images(tmp_path, [make(2, 0)]) == {}
    assert read_images(tmp_path, rows[1:]) == {"ab12": b"first"}
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(contents)
    (tmp_path / "images" / "cd34").unlink()
    with pytest.raises(DumpError, match="a file of an image of its rows is missing"):
        read_images(tmp_path, rows)
    outside = (ImageRef("../step_000000.0-of-2.parquet", 0, 1, 1),)
    with pytest.raises(DumpError, match="is no hash of an image"):
        read_images(tmp_path, [make(3, 0, images=outside)])


def test_nan_of_a_failed_sample_survives(tmp_path):
    failed = make(0, 0, rollout_logprobs=[math.nan, -1.5], status="failed", failure="nan")
    write_batch(tmp_path, 0, 0, [failed])
    (row,) = read_batch(tmp_path, 0).trajectories
    assert math.isnan(row.rollout_logprobs[0]) and row.rollout_logprobs[1] == -1.5


def test_parts_are_merged_and_a_step_counts_only_when_whole(tmp_path):
    row_format = [make(group, index) for group in range(2) for index in range(2)]
    write_batch(tmp_path, 4, 3, row_format[2:], part=1, parts=2)
    assert recorded_steps(tmp_path) == []
    with pytest.raises(DumpError, match="step 4 is incomplete"):
        read_batch(tmp_path, 4)
    write_batch(tmp_path, 4, 3, row_format[:2], part=0, parts=2)
    assert recorded_steps(tmp_path) == [4]
    assert read_batch(tmp_path, 4).trajectories == row_format
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000004.0-of-2.parquet", "step_000004.1-of-2.parquet",
    ]  # fmt: skip


def test_a_step_rewritten_by_fewer_writers_replaces_the_old_parts(tmp_path):
    for part in range(2):
        write_batch(tmp_path, 1, 0, [make(part, 0)], part=part, parts=2)
    write_batch(tmp_path, 1, 0, [make(7, 0)])
    assert [each.group_id for each in read_batch(tmp_path, 1).trajectories] == [7]


def test_parts_that_disagree_are_refused(tmp_path):
    write_batch(tmp_path, 1, 0, [make(0, 0)], part=0, parts=2)
    write_batch(tmp_path, 1, 1, [make(1, 0)], part=1, parts=2)
    with pytest.raises(DumpError, match="weight version 1"):
        read_batch(tmp_path, 1)
    write_batch(tmp_path, 1, 0, [make(0, 0)], part=1, parts=2)
    with pytest.raises(DumpError, match="0:0 is recorded twice"):
        read_batch(tmp_path, 1)


def test_missing_and_damaged_batches_are_named(tmp_path):
    assert recorded_steps(tmp_path / "nowhere") == []
    with pytest.raises(DumpError, match="no batch of step 9"):
        read_batch(tmp_path, 9)
    path = write_batch(tmp_path, 2, 0, [make(0, 0)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DumpError, match=r"step_000002\.0-of-1\.parquet: not a readable"):
        read_batch(tmp_path, 2)
    path = write_batch(tmp_path, 3, 0, [make(0, 0)])
    path.rename(tmp_path / "step_000005.0-of-1.parquet")
    with pytest.raises(DumpError, match="holds step 3, its name says 5"):
        read_batch(tmp_path, 5)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    before = write_batch(tmp_path, 0, 0, [make(0, 0)]).read_bytes()

    def refuse(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_batch(tmp_path, 0, 0, [make(5, 5)])
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_tokens_of_lost_updates_keep_their_origin_in_every_record(tmp_path):
    """The records: queue, recorded batch, samples.jsonl. The tokens count as older than any of the history."""
    row = make(1, 0, versions=(VersionSpan(3, 0, 1), VersionSpan(5, 1, 2, lost=2, epoch=4)))
    assert row.tag.oldest_version == 1  # from version 5 two updates back to 3, which is as far from later ones as 1
    assert row_format.decode(*row_format.encode([row, make(1, 1)])) == [row, make(1, 1)]
    write_batch(tmp_path, 3, 3, [row])
    assert read_batch(tmp_path, 3).trajectories == [row]
    assert sample_record(3, row, decode, "5")["versions"][1] == {
        "version": 5, "start": 1, "end": 2, "lost": 2, "epoch": 4,
    }  # fmt: skip


def decode(ids):
    return " ".join(map(str, ids))


def test_sample_record():
    first = sample_record(3, make(1, 0), decode, "5")
    assert (first["step"], first["group_id"], first["prompt"], first["response"]) == (3, 1, "5 6 8", "8 9")
    assert first["reference"] == "5" and first["response_tokens"] == 2 and first["finish_reason"] == "stop"
    assert first["reward_components"] == {"accuracy": 0.1, "format": 1.0}
    assert first["versions"] == [{"version": 0, "start": 0, "end": 1}, {"version": 3, "start": 1, "end": 2}]
    assert "parts" not in first
    turns = replace(make(1, 0), response_ids=[8, 3, 4, 9], response_mask=[1, 0, 0, 1], rollout_logprobs=[0.0] * 4)
    assert sample_record(3, turns, decode, "5")["parts"] == [
        {"by": "model", "text": "8"}, {"by": "environment", "text": "3 4"}, {"by": "model", "text": "9"}
    ]  # fmt: skip
    failed = make(0, 0, reward=math.nan, status="failed", failure="log-prob NaN", reward_error="late", versions=())
    line = json.loads(json.dumps(sample_record(0, failed, decode, None), allow_nan=False))
    assert line["reward"] is None and line["failure"] == "log-prob NaN" and line["reference"] is None
    assert line["reward_error"] == "late"


def test_choice_ignores_arrival_order_and_varies_by_step():
    keys = [f"{group}:{index}" for group in range(8, 12) for index in range(4)]
    assert choose_keys(keys, 3, 0, 5) == choose_keys(keys[::-1], 3, 0, 5)
    assert len({tuple(choose_keys(keys, 3, 0, step)) for step in range(10)}) > 5
    assert choose_keys(keys[::-1], 99, 0, 0) == keys and choose_keys(keys, 0, 0, 0) == []
    mixed = ["10:0", "2:1.1", "2:1.10", "2:1.2", "2:0", "2:1"]
    assert choose_keys(mixed, 9, 0, 0) == ["2:0", "2:1", "2:1.1", "2:1.2", "2:1.10", "10:0"]
