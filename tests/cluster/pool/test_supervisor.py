"""The supervisor without Ray: it watches on while disk or libraries fail, and tells the reason of its end."""

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported

import errno
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray

from megarl.cluster.pool import state as pool_state
from megarl.cluster.pool import supervisor as module
from megarl.cluster.pool.pool_process import (
    STATE_FILE,
    STOP_FILE,
    SupervisorHandle,
    SupervisorSpec,
    attach_supervisor,
    await_rebuilt,
    read_state,
    write_state,
)
from megarl.cluster.pool.supervisor import Supervisor
from megarl.common.errors import PartsLost, PoolEnded, RolloutError, SupervisorFailed
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import private_directory
from tests.support.trainer.configs import config

GONE = ProcessId(1, -1)
REQUESTED = "the launcher (pid 7) is gone"


def supervisor_in(
    directory: Path, agent: ProcessId | None = None, rpc_s: float = 60.0, cuda: bool = False, **changes: Any
) -> Supervisor:
    content = config("model", run__dir=str(directory), timeouts__rpc_s=rpc_s, **changes).model_dump_json()
    made = Supervisor(
        SupervisorSpec(content, str(directory), agent or ProcessId.own(), "abc", 0, "/", cuda=cuda),
        directory / "private",
    )
    made._guardian = GONE
    return made


def test_the_guardian_is_told_whom_it_watches_and_is_patient_until_a_tear_down_has_had_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ProcessId(7, 77)
    made, commands = supervisor_in(tmp_path, agent), list[list[str]]()

    def start(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(subprocess, "Popen", start)
    made._start_guardian()
    [[*program, state_file, private, pid, start_time, agent_pid, agent_start_time, patience_s]] = commands
    assert program == [sys.executable, "-m", "megarl.cluster.pool.guardian"]
    assert (Path(state_file), Path(private)) == (tmp_path / STATE_FILE, tmp_path / "private")
    assert ProcessId(int(pid), int(start_time)) == ProcessId.own() == made._guardian
    assert ProcessId(int(agent_pid), int(agent_start_time)) == agent
    whole_s = made.config.timeouts.shutdown_s  # half of it for an orderly end, the rest for a forced one
    assert whole_s / 2 < float(patience_s) < whole_s


@pytest.mark.parametrize(("given", "said"), [(None, "2,3"), ("4,5,6,7", "6,7")])
def test_ray_sees_the_gpus_of_the_rollout_pool_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, said: str
) -> None:
    """All engines of this node are children of Ray's head, and have its environment."""
    seen = list[str | None]()

    class Head:
        address = "127.0.0.1:1"

        def __init__(self, *arguments: object) -> None: ...

        def start(self) -> None:
            seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            raise Ended

    chosen = {"trainer": {"gpus": 2, "precision": "fp32", "micro_batch_tokens": 256}, "rollout": {"replicas": 2}}
    made = supervisor_in(tmp_path, cuda=True, **chosen)
    monkeypatch.setattr(module, "RayHead", Head)
    with mock.patch.dict(os.environ), pytest.raises(Ended):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if given is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = given
        made._start_ray()
    assert seen == [said]


class Ended(BaseException):
    """Ends a loop that nothing else may end."""


def test_a_start_sweeps_what_dead_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, here = tmp_path / "tmp", Path.cwd()
    base.mkdir()
    monkeypatch.setattr(private_directory, "_base", lambda: base)
    left = private_directory.make_private_directory()
    owner = json.loads((left / "owner.json").read_text())
    owner["process"]["start_time"] = 1  # this pid, but of an earlier process
    (left / "owner.json").write_text(json.dumps(owner))
    seen: list[list[Path]] = []

    def end(code: int) -> None:
        raise Ended

    class Started:
        def __init__(self, spec: SupervisorSpec, private: Path) -> None:
            seen.extend([list(base.iterdir()), [private]])
            raise Ended

    content = config("model", run__dir=str(tmp_path)).model_dump_json()
    SupervisorSpec(content, str(tmp_path), GONE, "abc", 0, str(here), cuda=False).save(tmp_path / "spec")
    monkeypatch.setattr(module, "redirect_output", lambda path: None)
    monkeypatch.setattr(module, "use_private_directory", lambda path: None)
    monkeypatch.setattr(module, "Supervisor", Started)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "argv", ["supervisor", str(tmp_path / "spec")])
    with mock.patch.dict(os.environ), pytest.raises(Ended):
        module.main()
    assert seen[0] == seen[1] and left not in seen[0]


def test_no_exception_ends_the_watch_and_few_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = supervisor_in(tmp_path)
    failures = iter([*[OSError(errno.ENOSPC, "No space left on device")] * 50, RuntimeError("of any kind"), Ended()])

    def fail(recorded: set[ProcessId]) -> set[ProcessId]:
        raise next(failures)

    monkeypatch.setattr(module, "WATCH_S", 0.0)
    monkeypatch.setattr(watched, "_watch_once", fail)
    with pytest.raises(Ended):
        watched._watch()
    assert caplog.text.count("the watch of the supervisor failed; it continues") == 1


def test_a_full_disk_does_not_hide_that_the_launcher_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is written when there is space again."""
    watched = supervisor_in(tmp_path, agent=GONE)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pool_state, "write_state", full)
        watched._state.publish(state="ready")
        watched._watch_once(set())
        assert watched.stop_reason == "the launcher (pid 1) is gone" and read_state(tmp_path) is None
    watched._state.publish(state="stopped")
    state = read_state(tmp_path)
    assert state is not None and state["state"] == "stopped"


@pytest.mark.parametrize(("content", "stops"), [("abc", True), ("", True), ("another launch", False)])
def test_the_stop_file_of_this_launch_stops_it(tmp_path: Path, content: str, stops: bool) -> None:
    watched = supervisor_in(tmp_path)
    (tmp_path / STOP_FILE).write_text(content)
    watched._watch_once(set())
    assert watched.stop_reason == ("asked to" if stops else None)


def test_a_stop_file_that_cannot_be_read_does_not_keep_the_watch_from_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = supervisor_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
        watched._state.published = False
        watched._watch_once(set())
        assert watched.stop_reason is None
    state = read_state(tmp_path)
    assert state is not None and watched._state.published, "the watch has written the state"


def test_a_supervisor_whose_directory_was_taken_writes_no_more_and_ends(tmp_path: Path) -> None:
    """The new run would take a foreign state for the end of its own pool."""
    write_state(tmp_path, {"launch_id": "an earlier one"})
    watched = supervisor_in(tmp_path)
    watched._state.publish(state="ready")
    watched._state.publish(heartbeats=1)
    state = read_state(tmp_path)
    assert state is not None and state["launch_id"] == "abc" and watched.stop_reason is None
    (tmp_path / STATE_FILE).unlink()
    watched._state.publish(heartbeats=2)
    assert read_state(tmp_path) is not None and watched.stop_reason is None
    write_state(tmp_path, {"launch_id": "the next one"})
    for changes in ({"heartbeats": 3}, {"state": "stopped"}):
        watched._state.publish(**changes)
        assert read_state(tmp_path) == {"launch_id": "the next one"}
    assert watched.stop_reason == f"another launch (the next one) has begun in {tmp_path}"


@pytest.mark.parametrize(
    ("requested", "failure", "during", "after", "said"),
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
    said: str,
) -> None:
    own = ProcessId.own()
    spec = SupervisorSpec(config("model").model_dump_json(), str(tmp_path), own, "abc", 0, "/", cuda=False)
    handle = SupervisorHandle(str(tmp_path), "a:1", spec.namespace, spec.partition, 0, "abc", own, platform.node())
    supervisor, found = Supervisor(spec, tmp_path / "private"), []

    def close_actors(timeout_s: float) -> None:
        with pytest.raises(PoolEnded, match="the rollout pool has ended") as raised:
            handle.check()
        found.append(str(raised.value))
        found.append((read_state(tmp_path) or {})["state"])

    monkeypatch.setattr(supervisor._actors, "close", close_actors)
    monkeypatch.setattr(supervisor, "_descendants", set)
    supervisor._state.publish(state="ready")
    handle.check()
    if requested is not None:
        supervisor.request_stop(requested)
    supervisor._tear_down(failure)
    assert found == [f"the rollout pool has ended: {said}; see {tmp_path / 'logs'}", during]
    state = read_state(tmp_path)
    assert state is not None and (state["state"], state["error"]) == (after, said)


def looks(
    made: Supervisor, answers: list[Exception | None], monkeypatch: pytest.MonkeyPatch, *, again: bool = False
) -> list[int]:
    """Give the supervisor a controller with `answers`, the last of them `again` and again; return the answers' numbers.

    Without `again`, the supervisor is asked to stop after the last one.
    """
    asked: list[int] = []

    def get(call: object, timeout: float) -> None:
        number = min(len(asked), len(answers) - 1)
        asked.append(number)
        if not again and len(asked) == len(answers):
            made.request_stop("the test ends")
        if (error := answers[number]) is not None:
            raise error

    controller: Any = SimpleNamespace(heartbeat=SimpleNamespace(remote=lambda: "call"))
    made._actors.handles = [controller]
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(module, "WATCH_S", 0.001)
    return asked


CUT = ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"0" * 16)


def test_a_short_network_cut_does_not_end_a_healthy_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers alone are counted, by which whoever keeps the pool tells that it is well."""
    made = supervisor_in(tmp_path)
    asked = looks(made, [None, CUT, CUT, CUT, None], monkeypatch)
    made._serve()
    state = read_state(tmp_path)
    assert asked == [0, 1, 2, 3, 4] and state is not None and state["heartbeats"] == 2


def test_a_controller_that_cannot_be_reached_ends_the_pool_after_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = supervisor_in(tmp_path, rpc_s=1.0)
    clock = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock) / 8))
    asked = looks(made, [None, CUT], monkeypatch, again=True)
    with pytest.raises(
        RolloutError, match=r"could not reach the rollout controller for [12] s \(timeouts.rpc_s\): The actor"
    ):
        made._serve()
    assert 2 < len(asked) <= 12


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.ActorDiedError(), "the rollout controller does not answer: The actor died"),
        (ray.exceptions.GetTimeoutError("late"), "the rollout controller does not answer: late"),
    ],
)
def test_a_controller_that_has_died_or_hangs_ends_the_pool_at_once(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = supervisor_in(tmp_path)
    asked = looks(made, [None, error, None], monkeypatch)
    with pytest.raises(RolloutError, match=message):
        made._serve()
    assert asked == [0, 1]


DIED = RolloutError("the rollout controller does not answer: The actor died")


def failing(made: Supervisor, failures: list[RolloutError], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the supervisor serve until it is asked to stop, after each of `failures`; return the reasons of rebuilds."""
    rebuilt: list[str] = []

    def serve() -> None:
        if failures:
            raise failures.pop(0)

    def rebuild(reason: str) -> None:
        made._rebuilt_at.append(time.monotonic())
        rebuilt.append(reason)

    monkeypatch.setattr(made, "_serve", serve)
    monkeypatch.setattr(made, "_rebuild", rebuild)
    return rebuilt


@pytest.mark.parametrize("last", [[], [RolloutError("the last one")]])
def test_a_dead_controller_and_a_dead_queue_are_started_again_until_they_have_died_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: list[RolloutError]
) -> None:
    made = supervisor_in(tmp_path)
    rebuilt = failing(made, [*[DIED] * module.MOST_REBUILDS, *last], monkeypatch)
    with pytest.raises(RolloutError, match="the last one") if last else nullcontext():
        made._keep_serving()
    assert rebuilt == [str(DIED)] * module.MOST_REBUILDS


def test_deaths_that_are_far_apart_do_not_add_up(tmp_path: Path) -> None:
    made, period = supervisor_in(tmp_path), module.REBUILD_PERIOD_S
    made._rebuilt_at = [number * period for number in range(50)]
    assert made._may_rebuild(50 * period)
    made._rebuilt_at += [50 * period] * (module.MOST_REBUILDS - 1)
    assert made._may_rebuild(50 * period + 1)
    made._rebuilt_at.append(50 * period + 1)
    assert not made._may_rebuild(50 * period + 2)


def test_nothing_is_started_again_for_a_pool_that_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = supervisor_in(tmp_path)
    rebuilt = failing(made, [DIED], monkeypatch)
    made.request_stop("SIGTERM")
    with pytest.raises(RolloutError):
        made._keep_serving()
    assert not rebuilt


def test_the_ranks_learn_of_the_new_queue_when_it_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle of the old one says at once that it is lost, and the engines are no part of that."""
    made, killed, seen = supervisor_in(tmp_path), [], []
    (tmp_path / "logs").mkdir()
    made._state.publish(state="ready", address="a:1")
    old = attach_supervisor(tmp_path, "abc", 1.0)
    new: Any = SimpleNamespace(start=SimpleNamespace(remote=lambda: "start"))
    engine: Any = "engine"
    made._actors.handles = [engine, "old controller"]  # type: ignore[list-item]

    def create(partition: str, timeout_s: float, *, replaces: bool) -> Any:
        assert replaces
        old.check()
        with pytest.raises(PartsLost, match="does not answer: The actor died"):
            old.check_parts()
        with pytest.raises(SupervisorFailed, match="still in state 'rebuilding'"):
            await_rebuilt(old, 0.0)
        seen.append(partition)
        return new

    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(made._actors, "_create_controller", create)
    monkeypatch.setattr(made._actors, "_await", lambda pending, timeout_s: seen.extend(pending.values()))
    made._rebuild(str(DIED))
    rebuilt = await_rebuilt(old, 1.0)
    assert killed == ["old controller"] and made._actors.handles == [engine, new]
    assert seen == [rebuilt.partition, "the new rollout controller"]
    assert rebuilt.partition != old.partition and rebuilt.rebuilds == 1
    rebuilt.check_parts()
    assert old.has_lost_parts(1.0) and not rebuilt.has_lost_parts(0.0)
    assert "restarting the rollout controller" in (tmp_path / "logs" / "notices.jsonl").read_text()


def test_a_stop_ends_the_wait_for_actors_that_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = supervisor_in(tmp_path)
    monkeypatch.setattr(ray, "wait", lambda pending, timeout: made.request_stop("SIGTERM") or ([], pending))
    with pytest.raises(RolloutError, match="stopped while starting: SIGTERM"):
        made._actors._await({"start": "engine replica 0"}, 0.5)  # type: ignore[dict-item]
