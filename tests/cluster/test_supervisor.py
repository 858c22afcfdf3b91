"""The supervisor's end, without Ray: what the ranks that still wait for the pool find in its state file."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from megarl.cluster.handle import SupervisorHandle, SupervisorSpec, read_state
from megarl.cluster.supervisor import Supervisor
from megarl.common.errors import PoolEnded
from megarl.common.processes import ProcessId
from tests.support.configs import config

REQUESTED = "the launcher (pid 7) is gone"


@pytest.mark.parametrize(
    ("requested", "failure", "during", "after", "told"),
    [
        (REQUESTED, None, "stopping", "stopped", REQUESTED),
        (REQUESTED, RuntimeError("the controller does not answer"), "stopping", "stopped", REQUESTED),
        (None, RuntimeError("replica 0: out of memory"), "failed", "failed", "replica 0: out of memory"),
    ],
)
def test_whoever_waits_for_an_actor_finds_the_reason_when_the_actor_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requested: str | None,
    failure: Exception | None,
    during: str,
    after: str,
    told: str,
) -> None:
    own = ProcessId.own()
    spec = SupervisorSpec(config("model").model_dump_json(), str(tmp_path), own, "abc", 0, "/", cuda=False)
    handle = SupervisorHandle(str(tmp_path), "a:1", spec.namespace, spec.partition, 0, "abc", own, platform.node())
    supervisor, found = Supervisor(spec), []

    def close_actors(timeout_s: float) -> None:
        with pytest.raises(PoolEnded, match="the rollout pool has ended") as raised:
            handle.check()
        found.append(str(raised.value))
        found.append((read_state(tmp_path) or {})["state"])

    monkeypatch.setattr(supervisor, "_close_actors", close_actors)
    monkeypatch.setattr(supervisor, "_descendants", set)
    supervisor._publish(state="ready")
    handle.check()
    if requested is not None:
        supervisor.request_stop(requested)
    supervisor._tear_down(failure)
    assert found == [f"the rollout pool has ended: {told}; see {tmp_path / 'logs'}", during]
    state = read_state(tmp_path)
    assert state is not None and (state["state"], state["error"]) == (after, told)
