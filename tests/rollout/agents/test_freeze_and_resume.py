"""A tool agent that is killed at any point and continued from its record comes to what an undisturbed one comes to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.rollout.agents.tool_states import AgentPhase
from megarl.rollout.journal_records import decode_unfinished, encode_unfinished
from megarl.rollout.loop_context import LoopContext
from megarl.rollout.loop_records import INTERRUPTED
from tests.support.checkout import ROOT
from tests.support.frozen_agents import GROUP, Attempt, Stop, Stopped, interrupted_books, outcome, undisturbed

EXPECTED, POINTS = undisturbed()


def killed(at: int) -> Stop:
    attempt = Attempt(Stop(at))
    with pytest.raises(Stopped):
        attempt.run()
    return attempt.stop


def check(first: Stop, second: dict[str, Any], interrupted: int) -> None:
    """No call that must not be repeated was doubled; one that was open has an error as its answer."""
    books = [*first.calls["book"], *second["book"]]
    assert sorted(books, key=str) == sorted(EXPECTED["book"], key=str)
    adds = [*first.calls["add"], *second["add"]]
    assert {str(call) for call in adds} == {str(call) for call in EXPECTED["add"]}
    texts = [turn["text"] for turns in second["turns"] for turn in turns]
    assert texts.count(INTERRUPTED) == interrupted
    if not interrupted:
        assert second["rows"] == EXPECTED["rows"] and second["turns"] == EXPECTED["turns"]
        assert len(adds) <= len(EXPECTED["add"]) + 2  # those that were open are repeated, one of each sample


def test_the_group_that_is_stopped_calls_tools_of_both_kinds_and_a_malformed_one() -> None:
    assert len(EXPECTED["add"]) == len(EXPECTED["book"]) == 4 and POINTS > 40
    assert all("cannot be read" in json.dumps(turns) for turns in EXPECTED["turns"])


@pytest.mark.parametrize("at", range(POINTS))
def test_a_group_that_is_stopped_at_any_point_goes_on_from_its_bytes(at: int) -> None:
    stop = killed(at)
    second = Attempt()
    rows = second.run(decode_unfinished(stop.record))
    check(stop, json.loads(json.dumps(outcome(rows, second))), interrupted_books(stop.record))


def test_every_waiting_state_is_among_those_points() -> None:
    phases = {killed(at).phase for at in range(POINTS)}
    assert {"generating", "calling"} <= phases <= {"generating", "calling", "done"}  # the others wait for nothing


def stopped_in(phase: str) -> list[Stop]:
    """Records and calls at each freeze of the first sample in a state; some states wait for nothing."""
    attempt, stops = Attempt(), list[Stop]()
    freeze = LoopContext.freeze

    def keep(self: Any, state: Any) -> None:
        freeze(self, state)
        if state.phase == phase and self.sample_index == 0:
            record = encode_unfinished(GROUP, self._progress.begun(), "problem")
            calls = {tool.name: list(tool.calls) for tool in (attempt.add, attempt.book)}
            stops.append(Stop(record=record, phase=phase, calls=calls))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopContext, "freeze", keep)
        attempt.run()
    return stops


def test_another_process_goes_on_from_each_state_and_at_ten_random_points(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the points: {seed}")
    stops = [killed(at) for at in random.Random(seed).sample(range(POINTS), 10)]
    entered = {phase: stopped_in(phase) for phase in get_args(AgentPhase)}
    # Three rounds of calls; in the first there are two calls, in the third one that cannot be read too.
    assert {phase: len(found) for phase, found in entered.items()} == {
        "generating": 3, "parsing": 4, "calling": 5, "inserting": 3, "done": 1
    }  # fmt: skip
    stops += [stop for found in entered.values() for stop in found]
    paths = [tmp_path / f"record-{number}" for number in range(len(stops))]
    for path, stop in zip(paths, stops, strict=True):
        path.write_bytes(stop.record)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.frozen_agents", *map(str, paths)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for stop, line in zip(stops, done.stdout.splitlines()[-len(stops) :], strict=True):
        check(stop, json.loads(line), interrupted_books(stop.record))
