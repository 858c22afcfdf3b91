"""A tool agent that is killed at any point and continued from its record comes to what an undisturbed one comes to."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.rollout.agents.tool_states import AgentPhase
from megarl.rollout.resume.group_progress import INTERRUPTED
from megarl.rollout.resume.journal_records import decode_unfinished
from tests.support.agents.frozen_agents import (
    Attempt,
    Stop,
    Stopped,
    interrupted_books,
    outcome,
    stops_at_freezes,
    undisturbed,
)
from tests.support.checkout import ROOT

EXPECTED, POINTS = undisturbed()


@cache
def killed(at: int) -> Stop:
    """The state of a group that is stopped at a point."""
    attempt = Attempt(Stop(at))
    with pytest.raises(Stopped):
        attempt.run()
    return attempt.stop


def check(first: Stop, second: dict[str, Any], record: bytes) -> None:
    """No call that must not be repeated was doubled; one that was open in the record has an error as its answer."""
    books = Counter(map(str, [*first.calls["book"], *second["book"]]))
    assert books <= Counter(map(str, EXPECTED["book"])), "a call is doubled"
    assert books.total() == len(EXPECTED["book"]) - first.unmade
    adds = [*first.calls["add"], *second["add"]]
    assert {str(call) for call in adds} == {str(call) for call in EXPECTED["add"]}
    texts = [turn["text"] for turns in second["turns"] for turn in turns]
    interrupted = interrupted_books(decode_unfinished(record)) if record else 0
    assert texts.count(INTERRUPTED) == interrupted
    if not interrupted:
        assert second["rows"] == EXPECTED["rows"] and second["turns"] == EXPECTED["turns"]
        if record == first.record:  # those that were open are repeated, one of each sample
            assert len(adds) <= len(EXPECTED["add"]) + 2


def test_the_group_that_is_stopped_calls_tools_of_both_kinds_and_a_malformed_one() -> None:
    assert len(EXPECTED["add"]) == len(EXPECTED["book"]) == 4 and POINTS > 40
    assert all("cannot be read" in json.dumps(turns) for turns in EXPECTED["turns"])


@pytest.mark.parametrize("at", range(POINTS))
def test_a_group_that_is_stopped_at_any_point_goes_on_from_its_bytes(at: int) -> None:
    stop = killed(at)
    for record in dict.fromkeys((stop.record, stop.written)):  # the last one of a journal may be older
        second = Attempt()
        rows = second.run(decode_unfinished(record) if record else None)
        check(stop, json.loads(json.dumps(outcome(rows, second))), record)


def test_the_records_of_the_journal_are_older_at_most_points() -> None:
    """Some of them without an open call, so that the undisturbed trajectory is what they have to come to."""
    stops = [killed(at) for at in range(POINTS)]
    stale = [stop.written for stop in stops if stop.written not in (b"", stop.record)]
    assert len(stale) > POINTS / 2
    assert {bool(interrupted_books(decode_unfinished(record))) for record in stale} == {True, False}


def test_every_waiting_state_is_among_those_points() -> None:
    phases = {killed(at).phase for at in range(POINTS)}
    assert {"generating", "calling"} <= phases <= {"generating", "calling", "done"}  # the others wait for nothing


def continued(paths: list[Path]) -> list[dict[str, Any]]:
    """The outcomes of another process that goes on from each record."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.agents.frozen_agents", *map(str, paths)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(paths) :]]


# Freezes of the first sample. Three rounds of calls; in the first are two calls, in the third one that cannot be read.
FREEZES = {"generating": 3, "parsing": 4, "calling": 5, "inserting": 3, "done": 1}


def test_another_process_goes_on_from_each_state_and_at_ten_random_points(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the points: {seed}")
    stops = [killed(at) for at in random.Random(seed).sample(range(POINTS), 10)]
    entered = stops_at_freezes()
    assert Counter(phase for phase, _ in entered) == FREEZES and set(FREEZES) == set(get_args(AgentPhase))
    stops += entered.values()
    paths = [tmp_path / f"record-{number}" for number in range(len(stops))]
    for path, stop in zip(paths, stops, strict=True):
        path.write_bytes(stop.record)
    for stop, second in zip(stops, continued(paths), strict=True):
        check(stop, second, stop.record)
