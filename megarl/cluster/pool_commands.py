"""Commands to the pool of a living run: files in RUN_DIR/pool that `megarl pool` writes and the supervisor answers.

A command is a file `ID.command`, ID random; the supervisor removes it when it has read it, and writes `ID.answer` when
the command is done. Directory and files are for the user of the run only. A command names the launch that it is for, so
that one that was left behind is never done by a later run.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megarl.cluster.handle import REBUILDING, SPEC_FILE, SupervisorSpec, read_state_again
from megarl.common.errors import ConfigError, clear_text
from megarl.common.processes import ProcessId, is_alive
from megarl.common.rate_limit import RateLimit
from megarl.config.schema import Config

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

DIRECTORY = "pool"
LARGEST_BYTES = 4096  # of a command
KEEP_S = 3600.0  # for which an answer that nobody has read is kept
COMPLAIN_S = 30.0  # between two log lines about the same trouble
POLL_S = 0.2
MARGIN_S = 30.0  # by which a command's own bounds end before the wait for its answer

Action = Literal["list", "drain", "undrain", "remove", "add"]
# The method of the controller that does it.
METHODS: Mapping[Action, str] = {
    "list": "list_replicas",
    "drain": "drain_replica",
    "undrain": "undrain_replica",
    "remove": "remove_replica",
    "add": "add_replicas",
}
_NAME = re.compile(r"([0-9a-f]{32})\.command")


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class PoolCommand:
    """Holds what is asked of the pool; `number` is the replica, or with `add` how many engines. `list` ignores it."""

    launch_id: str
    action: Action
    number: int


@dataclass(frozen=True)
class PoolAnswer:
    """Holds what a command has brought: its `result`, or why it could not be done."""

    result: Any
    error: str | None


_COMMAND = TypeAdapter(PoolCommand)


class PoolCommands:
    """The supervisor's side: `look` at intervals reads new commands, has the controller do them, and answers."""

    def __init__(self, run_dir: Path, launch_id: str) -> None:
        self._directory, self._launch_id = run_dir / DIRECTORY, launch_id
        self._running: dict[ObjectRef, str] = {}  # the commands' ids
        self._has_directory = False
        self._complaints = RateLimit(COMPLAIN_S)

    def _make_directory(self) -> None:
        """Make the directory, and remove what an earlier launch has left there."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._directory.chmod(0o700)
        self._remove_older_than(0.0)
        self._has_directory = True

    def look(self, controller: ActorHandle) -> None:
        """Have the controller begin what is new, and answer what is done.

        It does not wait, and a disk that fails ends nothing.
        """
        try:
            if not self._has_directory:
                self._make_directory()
            for path in sorted(self._directory.iterdir()):
                if (name := _NAME.fullmatch(path.name)) is not None:
                    self._begin(name[1], path, controller)
            self._answer_done()
        except OSError as error:
            if self._complaints.allows():
                logger.warning("the commands to the pool cannot be read now: %s", error)

    def _begin(self, name: str, path: Path, controller: ActorHandle) -> None:
        try:
            command = read_command(path)
            if command.launch_id != self._launch_id:
                raise ValueError(f"the command is for launch {command.launch_id}, this is {self._launch_id}")
        except (ValueError, OSError) as error:
            logger.warning("a command to the pool is refused: %s", error)
            path.unlink(missing_ok=True)
            self._answer(name, PoolAnswer(None, f"the command is refused: {error}"))
            return
        path.unlink()  # before it is done: nothing is done twice
        logger.info("command %s: %s %d", name, command.action, command.number)
        method = getattr(controller, METHODS[command.action])
        arguments = () if command.action == "list" else (command.number,)
        self._running[method.remote(*arguments)] = name

    def _answer_done(self) -> None:
        import ray

        if not self._running:
            return
        done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for reference in done:
            name = self._running.pop(reference)
            try:
                answer = PoolAnswer(_as_json(ray.get(reference, timeout=1.0)), None)
            except Exception as error:
                cause = getattr(error, "cause", None)
                answer = PoolAnswer(None, clear_text(cause if isinstance(cause, BaseException) else error))
            self._answer(name, answer)

    def _answer(self, name: str, answer: PoolAnswer) -> None:
        logger.info("command %s: %s", name, answer.error or "done")
        self._remove_older_than(KEEP_S)
        _write(self._directory / f"{name}.answer", asdict(answer))

    def _remove_older_than(self, age_s: float) -> None:
        """Remove files that nobody has come for."""
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):
                if path.name.endswith((".command", ".answer")) and time.time() - path.stat().st_mtime >= age_s:
                    path.unlink()


def read_command(path: Path) -> PoolCommand:
    """Read a command. Raises ValueError if it is none, or not a plain file that only this user can have written."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise ValueError(f"{path} is not a file that only the user of the run can write")
        content = opened.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"{path} has more than {LARGEST_BYTES} bytes")
    try:
        return _COMMAND.validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{path} is not a command: {error.errors()[0]['msg']}") from None


def ask_pool(
    run_dir: Path, action: Action, number: int = 0, *, timeout_s: float | None = None, say: Callable[[str], object]
) -> Any:  # noqa: ANN401  # JSON content, which depends on the action
    """Have the pool of a living run do something; return its answer.

    `timeout_s`: the longest wait; None: what the action may take by the run's own time-outs. `say` is told once what is
    waited for. Raises ConfigError if no run lives there, if the command cannot be done, or if no answer comes in time.
    """
    assert action in get_args(Action)
    state = _living_state(run_dir)
    host, bound_s = state["host"], timeout_s or _bound_s(run_dir, action)
    directory, name = run_dir / DIRECTORY, secrets.token_hex(16)
    command, answer = directory / f"{name}.command", directory / f"{name}.answer"
    what = f"the supervisor of {run_dir} (pid {state['process']['pid']} on {host})"
    try:
        _write(command, asdict(PoolCommand(state["launch_id"], action, number)))
    except OSError as error:
        raise ConfigError([f"the command could not be written: {error}; run it as the user of the run"]) from error
    try:
        say(f"waiting up to {bound_s:.0f} s for {what}")
        return _await_answer(run_dir, command, answer, bound_s, f"{what} to {action}")
    finally:
        command.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


def _await_answer(run_dir: Path, command: Path, answer: Path, bound_s: float, what: str) -> Any:  # noqa: ANN401  # JSON content
    deadline = time.monotonic() + bound_s
    while True:
        with suppress(OSError):  # it is not there yet, or the file system fails for a moment
            given = PoolAnswer(**json.loads(answer.read_text()))
            if given.error is not None:
                raise ConfigError([given.error])
            return given.result
        _living_state(run_dir, waits=True)
        if time.monotonic() > deadline:
            if command.exists():
                raise ConfigError([f"waited {bound_s:.0f} s for {what}, which has not read the command: is it alive?"])
            told = f"waited {bound_s:.0f} s for {what}, which goes on: `megarl pool list` shows when it is done"
            raise ConfigError([told])
        time.sleep(POLL_S)


def _living_state(run_dir: Path, *, waits: bool = False) -> dict[str, Any]:
    """Return the state of the supervisor of a living run, whose engines are up. Raises ConfigError if there is none.

    Whoever `waits` for an answer gets it also after the controller has been started anew meanwhile.
    """
    state = read_state_again(run_dir)
    if state is None:
        raise ConfigError([f"{run_dir} has no supervisor.json: no run has started there, or it is not a run directory"])
    if state["host"] == platform.node() and not is_alive(ProcessId(**state["process"])):
        raise ConfigError([f"no run lives in {run_dir}: its supervisor (pid {state['process']['pid']}) has ended"])
    if state["state"] == "starting":
        raise ConfigError([f"the engines of {run_dir} are still being started: try again when they are up"])
    if state["state"] == REBUILDING:
        if waits:
            return state
        raise ConfigError([f"the rollout controller of {run_dir} is being started anew: try again in a minute"])
    if state["state"] != "ready":
        reason = f": {state['error']}" if state.get("error") else ""
        raise ConfigError([f"no run lives in {run_dir}: its pool is {state['state']}{reason}"])
    return state


def _bound_s(run_dir: Path, action: Action) -> float:
    """Return how long an action may take: that of the parts for which it waits, and a margin."""
    spec = SupervisorSpec.load(run_dir / "logs" / SPEC_FILE)
    config = Config.model_validate_json(spec.config_json)
    timeouts = config.timeouts
    parts = {
        "list": timeouts.rpc_s,
        "undrain": timeouts.rpc_s,
        "add": timeouts.node_s + timeouts.engine_start_s,
    }
    return parts.get(action, config.rollout.report_interval_s + 2 * timeouts.rpc_s) + MARGIN_S


def _write(path: Path, content: object) -> None:
    """Write JSON to a new file that only this user can read, at once as a whole."""
    temporary = path.with_name(f".{path.name}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    temporary.replace(path)


def _as_json(result: Any) -> Any:  # noqa: ANN401  # of the method of the action
    """Return a method's result as JSON content: a text, or reports of replicas and the number of missing ones."""
    if isinstance(result, str):
        return result
    reports, missing = result
    return {"replicas": [asdict(report) for report in reports], "missing": missing}
