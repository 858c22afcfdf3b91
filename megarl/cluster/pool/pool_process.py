"""The launcher's side of the supervisor: start it in a session of its own, get its address, stop it.

Called by rank 0 of a bare torchrun, by a node's agent, by `megarl eval` and `megarl serve`. Imports neither Ray nor
vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megarl.common.clocks import RateLimit
from megarl.common.errors import PartsLost, PoolEnded, SupervisorFailed
from megarl.common.files import replace_file
from megarl.common.process.processes import ProcessId, is_alive, kill, sweep
from megarl.config.schema import Config

logger = logging.getLogger(__name__)

STATE_FILE = "supervisor.json"
STOP_FILE = "supervisor.stop"
SPEC_FILE = "supervisor_spec.json"
REBUILDING = "rebuilding"  # the state of a pool with live engines, while controller and queue restart
# The supervisor looks every 2 s and reports dead parts, or parts that hang beyond their bound, within this time.
NOTICED_S = 10.0
REPORT_S = 30.0  # between two lines for the user while engines start
TROUBLE_S = 10.0  # how long a file system may fail while a run starts
_complaints = RateLimit(30.0)
_ENDED = {"failed": "failed", "stopping": "is stopping", "stopped": "stopped"}  # states after which none is "ready"


@dataclass(frozen=True)
class SupervisorHandle:
    """Everything that a rank needs to connect, as plain data that can be broadcast.

    `rebuilds`: how often the pool has started controller and queue again; `partition` is that of the present queue.
    """

    run_dir: str
    address: str
    namespace: str
    partition: str
    attempt: int
    launch_id: str
    process: ProcessId
    host: str
    rebuilds: int = 0

    @classmethod
    def of(cls, run_dir: Path, state: Mapping[str, Any]) -> SupervisorHandle:
        """Return the handle that a supervisor's state describes."""
        return msgspec.convert({**state, "run_dir": str(run_dir)}, cls)

    def is_alive(self) -> bool:
        """Return False once the supervisor is known to be gone.

        A supervisor on another node counts as alive: the agent of its node watches it and ends the job with it.
        """
        return self.host != platform.node() or is_alive(self.process)

    def check(self) -> None:
        """Raise PoolEnded with the reason if the pool has ended. A wait for the pool calls it now and then. An
        unreadable state file means nothing: a shared file system may fail for a moment.
        """
        self._checked_state()

    def check_parts(self) -> None:
        """Raise as `check`, and PartsLost if controller and queue are no longer those of this handle."""
        state = self._checked_state()
        if state.get("rebuilds", self.rebuilds) != self.rebuilds:
            raise PartsLost(f"the rollout controller and its queue have ended: {state.get('rebuilt_because')}")

    def has_lost_parts(self, timeout_s: float) -> bool:
        """Wait until the supervisor has noticed that controller and queue have ended; False if not in time.

        Raises as `check`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.check_parts()
            except PartsLost:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def _checked_state(self) -> dict[str, Any]:
        """Return the supervisor's state; {} if it cannot be read now. Raises as `check`."""
        run_dir = Path(self.run_dir)
        state = _state_now(run_dir)
        if state is None and self.is_alive():
            return {}
        state = state or {}
        launch_id = state.get("launch_id", self.launch_id)
        if launch_id != self.launch_id:
            reason: str | None = f"another launch ({launch_id}) has begun in {run_dir}"
        elif self.is_alive() and state.get("state") in {"ready", REBUILDING}:
            return state
        else:
            reason = state.get("error")
        raise PoolEnded(f"the rollout pool has ended: {reason or 'its supervisor was killed'}; see {run_dir / 'logs'}")


@dataclass(frozen=True)
class SupervisorSpec:
    """The launcher's arguments to the supervisor; `agent` is the process whose end ends the pool.

    `serves`: the pool has a gateway and no trainer. `gateway_token_file`: a file of the user with the token of the
    gateway's clients; None: one is made.
    """

    config_json: str
    run_dir: str
    agent: ProcessId
    launch_id: str
    attempt: int
    cwd: str
    cuda: bool
    serves: bool = False
    gateway_token_file: str | None = None

    @property
    def namespace(self) -> str:
        """Ray namespace of the run's actors."""
        return f"megarl-{self.launch_id}"

    @property
    def partition(self) -> str:
        """Name of the run's queue partition, unique to this launch and attempt."""
        return f"{Path(self.run_dir).name}-{self.launch_id}.{self.attempt}"

    def save(self, path: Path) -> None:
        """Write the fields as JSON; `load` reads them in the supervisor's process."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> SupervisorSpec:
        """Read what `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """Read RUN_DIR/supervisor.json; None if there is none. It is replaced atomically, so it is never half a file."""
    try:
        return json.loads((run_dir / STATE_FILE).read_text())
    except FileNotFoundError:
        return None


def read_state_again(run_dir: Path, timeout_s: float = TROUBLE_S) -> dict[str, Any] | None:
    """Read as `read_state`, retrying for `timeout_s` while the file system fails. Then raises OSError."""
    deadline = time.monotonic() + timeout_s
    while (state := _state_now(run_dir)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return state or read_state(run_dir)


def _state_now(run_dir: Path) -> dict[str, Any] | None:
    """Return the state of the pool, {} if there is none; None if it cannot be read now, which is logged now and then.

    A shared file system may fail for a moment.
    """
    try:
        return read_state(run_dir) or {}
    except OSError as error:
        if _complaints.allows():
            logger.warning("the state of the rollout pool cannot be read now; reading it again: %s", error)
        return None


def _is_own(state: dict[str, Any] | None, launch_id: str) -> bool:
    """Return whether a state may be that of this launch's pool; False if another launch has replaced it."""
    return not state or state.get("launch_id", launch_id) == launch_id


def write_state(run_dir: Path, state: dict[str, Any]) -> None:
    """Replace RUN_DIR/supervisor.json atomically."""
    replace_file(run_dir / STATE_FILE, json.dumps(state, indent=1).encode())


def launch_supervisor(
    config_json: str,
    run_dir: Path | str,
    agent_pid: int,
    *,
    cuda: bool = False,
    serves: bool = False,
    gateway_token_file: str | None = None,
) -> SupervisorHandle:
    """Start the supervisor here and wait until its Ray head is up; engines continue to start in the background.

    A supervisor left running by the previous attempt of the same agent is reused if it has the same config and still
    finds controller and queue alive. `agent_pid`: the process whose end ends the pool (torchrun's agent). `serves` and
    `gateway_token_file`: see SupervisorSpec. Raises SupervisorFailed if the head does not start within
    `timeouts.ray_start_s`.
    """
    run_dir = Path(run_dir).resolve()
    timeouts = Config.model_validate_json(config_json).timeouts
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    launch_id = _kept_supervisor(run_dir, agent_pid, config_json)
    if launch_id is not None and not _is_sound(run_dir, launch_id, 3 * timeouts.rpc_s):
        launch_id = None
    if launch_id is None:
        launch_id = uuid.uuid4().hex[:8]
        start_supervisor(
            config_json, run_dir, agent_pid, launch_id, cuda=cuda, serves=serves, gateway_token_file=gateway_token_file
        )
    else:
        logger.info("reusing the pool of the previous attempt")
    try:
        return attach_supervisor(run_dir, launch_id, timeouts.ray_start_s)
    except KeyboardInterrupt:  # the caller has no handle to end it with
        if (started := _STARTED.get(launch_id)) is not None:
            with suppress(ProcessLookupError):  # it has ended already
                stop_supervisor(run_dir, ProcessId.of(started.pid), launch_id, timeouts.shutdown_s)
        raise


def _kept_supervisor(run_dir: Path, agent_pid: int, config_json: str) -> str | None:
    """Return the launch id of a ready pool that the process `agent_pid` itself has started, or None."""
    state = read_state_again(run_dir)
    if state is None or state["state"] != "ready" or (run_dir / STOP_FILE).exists():
        return None
    if not is_alive(ProcessId(**state["process"])) or ProcessId(**state["agent"]) != ProcessId.of(agent_pid):
        return None
    spec = SupervisorSpec.load(run_dir / "logs" / SPEC_FILE)
    same = spec.launch_id == state["launch_id"] and spec.config_json == config_json
    return spec.launch_id if same else None


def _is_sound(run_dir: Path, launch_id: str, timeout_s: float) -> bool:
    """Wait until the supervisor has found controller and queue alive by a look that began after this call.

    A death during the previous attempt may not have been noticed yet. The first check that ends from now on may have
    begun before this call; the second has not.
    """
    before = (read_state_again(run_dir) or {}).get("heartbeats", 0)
    try:
        _await_state(run_dir, launch_id, lambda state: state.get("heartbeats", 0) >= before + 2, timeout_s)
    except SupervisorFailed as error:
        logger.warning("the pool of the previous attempt is not reused: %s", error)
        return False
    return True


def start_supervisor(
    config_json: str,
    run_dir: Path,
    agent_pid: int,
    launch_id: str,
    *,
    cuda: bool,
    serves: bool = False,
    gateway_token_file: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start the supervisor's process in a session of its own."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    previous = _retire_previous(run_dir)
    spec = SupervisorSpec(
        config_json=config_json,
        run_dir=str(run_dir),
        agent=ProcessId.of(agent_pid),
        launch_id=launch_id,
        attempt=previous + 1,
        cwd=os.getcwd(),
        cuda=cuda,
        serves=serves,
        gateway_token_file=gateway_token_file,
    )
    spec.save(run_dir / "logs" / SPEC_FILE)
    command = [sys.executable, "-m", "megarl.cluster.pool.supervisor", str(run_dir / "logs" / SPEC_FILE)]
    with (run_dir / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=clean_environment(),
        )  # fmt: skip
    _STARTED[spec.launch_id] = process
    return process


def attach_supervisor(run_dir: Path | str, launch_id: str, timeout_s: float) -> SupervisorHandle:
    """Wait for the Ray head of this launch's supervisor, which was started here or on another node.

    Raises SupervisorFailed if it is not up within `timeout_s`.
    """
    run_dir = Path(run_dir).resolve()
    return SupervisorHandle.of(
        run_dir, _await_state(run_dir, launch_id, lambda state: bool(state["address"]), timeout_s)
    )


# Supervisors started by this process, by launch id. They are polled so that none stays a zombie.
_STARTED: dict[str, subprocess.Popen[bytes]] = {}


def clean_environment() -> dict[str, str]:
    """Return this environment without torchrun's variables, which vLLM and torch would use."""
    torchrun = ("TORCHELASTIC_", "GROUP_", "ROLE_")
    exact = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {k: v for k, v in os.environ.items() if k not in exact and not k.startswith(torchrun)}


def _retire_previous(run_dir: Path) -> int:
    """End a supervisor that an earlier attempt left in the claimed `run_dir`; return its attempt number (-1: none)."""
    state = read_state_again(run_dir)
    (run_dir / STOP_FILE).unlink(missing_ok=True)
    if state is None:
        return -1
    process = ProcessId(**state["process"])
    # Pids of another node mean nothing here: that node's agent ends its supervisor.
    if state["host"] == platform.node() and is_alive(process):
        stop_supervisor(run_dir, process, state["launch_id"], timeout_s=60.0, host=state["host"])
    return int(state["attempt"])


def wait_ready(
    handle: SupervisorHandle, timeout_s: float, report: Callable[[str], object] = lambda text: None
) -> SupervisorHandle:
    """Wait until engines, controller and queue are up; return the handle of those that are.

    Engines may take minutes, so `report` gets a line now and then. Raises SupervisorFailed with the cause if one of
    them fails.
    """
    run_dir, started = Path(handle.run_dir), time.monotonic()
    due = REPORT_S

    def is_ready(state: dict[str, Any]) -> bool:
        nonlocal due
        waited_s = time.monotonic() - started
        if state["state"] != "ready" and waited_s >= due:
            due += REPORT_S
            report(
                f"still waiting for the rollout engines ({waited_s:.0f} s of at most {timeout_s:.0f}; their logs: "
                f"{run_dir / 'logs'})"
            )
        return bool(state["state"] == "ready")

    return SupervisorHandle.of(run_dir, _await_state(run_dir, handle.launch_id, is_ready, timeout_s))


def await_rebuilt(handle: SupervisorHandle, timeout_s: float) -> SupervisorHandle:
    """Wait for controller and queue to restart after those of `handle`; return the new handle.

    Raises SupervisorFailed if the pool ends instead, or after `timeout_s`.
    """

    def is_rebuilt(state: dict[str, Any]) -> bool:
        return state["state"] == "ready" and state.get("rebuilds", 0) > handle.rebuilds

    run_dir = Path(handle.run_dir)
    return SupervisorHandle.of(run_dir, _await_state(run_dir, handle.launch_id, is_rebuilt, timeout_s))


def _await_state(
    run_dir: Path, launch_id: str, done: Callable[[dict[str, Any]], bool], timeout_s: float
) -> dict[str, Any]:
    """Wait until `done` of the state of this launch's pool. Retries while the file system fails.

    Raises SupervisorFailed if the pool ends instead, or after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    process = _STARTED.get(launch_id)
    while True:
        state = _state_now(run_dir)
        if state and state["launch_id"] == launch_id:
            if ended := _ENDED.get(state["state"]):
                raise SupervisorFailed(f"the rollout pool {ended}: {state['error'] or 'asked to stop'}")
            if done(state):
                return state
            if state["host"] == platform.node() and not is_alive(ProcessId(**state["process"])):
                raise SupervisorFailed(f"the supervisor died; see {run_dir / 'logs' / 'supervisor.log'}")
        elif process is not None and process.poll() is not None:
            raise SupervisorFailed(
                f"the supervisor ended with code {process.returncode}; see {run_dir / 'logs' / 'supervisor.log'}"
            )
        if time.monotonic() > deadline:
            at = f"is still in state {state['state']!r}" if state else "has not written its state"
            at = "may have written its state, which cannot be read" if state is None else at
            raise SupervisorFailed(f"waited {timeout_s:.0f} s for the supervisor, which {at}; see {run_dir / 'logs'}")
        time.sleep(0.05)


def stop_supervisor(
    run_dir: Path, process: ProcessId, launch_id: str, timeout_s: float, host: str | None = None
) -> None:
    """Ask the supervisor to tear down the pool and wait; after `timeout_s` kill it and its recorded children.

    A supervisor on another `host` (default: this one) is not killed: the agent of its node does that. Once the
    supervisor of another launch has replaced the state, `run_dir` belongs to another run, and nothing is written there.
    A supervisor on another host then ends by itself and is not waited for.
    """
    here = host in {None, platform.node()}
    try:
        if _is_own(_state_now(run_dir), launch_id):
            (run_dir / STOP_FILE).write_text(launch_id)
        elif here:
            kill([process], signal.SIGTERM)
    except OSError:  # a full disk, for example
        if not here:
            raise
        kill([process], signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for child in _STARTED.values():
            child.poll()
        state = _state_now(run_dir) or {}
        ended = not _is_own(state, launch_id) or state.get("state") in {"stopped", "failed"}
        if not is_alive(process) if here else ended:
            break
        time.sleep(0.05 if here else 0.5)
    if here and is_alive(process):
        logger.error("the supervisor (pid %d) did not stop within %.0f s: killing it", process.pid, timeout_s)
        state = _state_now(run_dir) or {}
        children = {ProcessId(**each) for each in state.get("children", ()) if _is_own(state, launch_id)}
        sweep({process, *children}, grace_s=0.0)
        os.kill(process.pid, signal.SIGKILL) if is_alive(process) else None
    for child in _STARTED.values():
        child.poll()
