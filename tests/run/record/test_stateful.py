"""The record of a checkpoint: what its parts store, under which keys, and that records of earlier releases load."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.derived.staleness import Pace
from megarl.data.mixture import Cursor
from megarl.rollout.admission.admission import Admission
from megarl.run.loop.evaluations import Evaluations
from megarl.run.loop.monitor import RunMonitor
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.loop.session import Session
from megarl.run.record.recorder import Recorder, collect, restore
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.old_records import OLD_RECORD, ROLLOUT, SUMMARY, TOTALS


class Part:
    def __init__(self, key: str, state: dict[str, Any] | None = None) -> None:
        self.key, self.state = key, state

    def state_dict(self) -> dict[str, Any]:
        assert self.state is not None
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


# "step" is the record's own key.
@given(
    st.dictionaries(
        st.text(max_size=4).filter(lambda key: key != "step"),
        st.dictionaries(st.text(max_size=4), JSON, max_size=3),
        max_size=5,
    )
)
def test_every_part_gets_its_own_state_back(states: dict[str, dict[str, Any]]) -> None:
    record = json.loads(json.dumps(collect(Part(key, state) for key, state in states.items())))
    restored = [Part(key) for key in reversed(states)]
    restore(restored, {**record, "step": 7})
    assert {part.key: part.state for part in restored} == states


def test_two_parts_with_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="two parts of the run store their state under 'totals'"):
        collect([Part("totals", {}), Part("files", {}), Part("totals", {})])


def test_a_record_without_a_part_is_refused() -> None:
    with pytest.raises(KeyError, match="totals"):
        restore([Part("rollout"), Part("totals")], {"rollout": {}})


def session_of(run_dir: Path) -> Any:
    """A session with the parts that have a state, and without a policy."""
    config = config_of("model", run__dir=str(run_dir))
    peers: Any = SimpleNamespace(is_first=False, group=None)
    recorder = Recorder(config, peers, io.StringIO())
    pool = RolloutClient(config, peers, recorder)
    evaluations = Evaluations(config, pool, recorder, lambda: False)
    monitor = RunMonitor(config.monitor, pool, recorder)
    session: Any = SimpleNamespace(
        config=config, pool=pool, recorder=recorder, evaluations=evaluations, monitor=monitor
    )
    assert Session.parts.fget is not None
    session.parts = list(Session.parts.fget(session))
    return session


def test_the_record_has_the_keys_of_its_format(tmp_path: Path) -> None:
    """Older checkpoints are read by these keys, and newer ones are read by older releases."""
    record = collect(session_of(tmp_path).parts)
    assert list(record) == ["rollout", "summary", "totals", "files", "metrics", "evaluations", "monitor"]
    assert record.keys() == OLD_RECORD.keys() - {"format", "step", "version"} | {"evaluations", "monitor"}
    assert record["summary"].keys() == SUMMARY.keys()
    assert record["totals"].keys() == TOTALS.keys() | {"groups_reused"}


def test_a_record_of_the_first_format_is_restored(tmp_path: Path) -> None:
    """It says nothing about evaluations alongside training, groups that were used again and alarms: there were none."""
    session = session_of(tmp_path)
    session._cut_result_files = None
    session.checkpointer = SimpleNamespace(restore=lambda cut: json.loads(json.dumps(OLD_RECORD)))
    assert Session._resume(session) == 3 and session.version == 3
    state = {part.key: part.state_dict() for part in session.parts}
    assert state["evaluations"] == {} and not any(state["monitor"].values())
    assert state["totals"] == TOTALS | {"groups_reused": 0.0}
    assert state["summary"]["wall_seconds"] >= 61.5
    assert state["summary"] | {"wall_seconds": 61.5} == SUMMARY
    assert session.pool._history == ROLLOUT  # what `attach` gives to the controller
    content = session.recorder.summary.as_dict("running")
    assert content["eval_before"] == {"greedy": 0.25, "sampled": 0.5, "n": 8} and content["steps"] == 3


def test_the_rollout_side_resumes_the_history_of_the_first_format() -> None:
    admission = Admission(groups=4, pace=Pace())
    admission.load_state_dict(ROLLOUT["admission"])
    counters = admission.counters
    assert (counters.admitted, counters.trained, counters.failed, counters.balanced) == (12, 9, 1, True)
    admission.set_version(3)
    assert admission.admit() == [12, 13, 14, 15]
    Cursor(32, seed=0, shuffle=True).load_state_dict(ROLLOUT["source"])
