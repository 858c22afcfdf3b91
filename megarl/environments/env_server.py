"""Starts an environment in a process and a virtual environment of its own, and again when it has died.

The process is the leader of a session, so that it is killed with all that it has started. It gets no variable of the
run's environment but those that a program needs, and the token of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError
from megarl.common.process.child_process import kill_session
from megarl.common.rundir.private_directory import VARIABLE
from megarl.environments.env_client import EnvironmentClient, TraceSoFar

PROGRAM = Path(__file__).with_name("server_program.py")
TOKEN_VARIABLE = "MEGARL_GATEWAY_API_KEY"  # verifiers keeps names with API_KEY from the programs that it starts
START_S = 300.0  # its imports alone are many seconds of computing, alongside engines that start too
LOOK_S = 1.0
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "HF_HOME", "SSL_CERT_FILE")
_TAIL = 2000  # characters of the log that an error shows


@dataclass(frozen=True)
class EnvironmentSpec:
    """Holds what to serve. `python`: that of the virtual environment. `paths`: directories with the taskset's modules.

    `environment`: verifiers' EnvConfig as JSON content. `variables`: further ones of the process.
    """

    python: Path
    environment: Mapping[str, Any]
    paths: Sequence[Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class EnvironmentServer:
    """One environment of one process of the run. To be used in one event loop."""

    def __init__(self, spec: EnvironmentSpec, log: Path, token: str) -> None:
        """`log`: where its output goes; `token`: that of the gateway's clients. Nothing is started yet."""
        self._spec, self._log, self._token = spec, log, token
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._client: EnvironmentClient | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, request: Mapping[str, Any]) -> list[TraceSoFar]:
        """Run the environment once, see `EnvironmentClient.run`; start the server if there is none."""
        return await (await self._connected()).run(request)

    @property
    def pid(self) -> int | None:
        """The process, which is the leader of its group; None if none is there."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def close(self) -> None:
        """Kill the server with all that it has started."""
        if self._process is not None:
            if self.pid is not None:
                kill_session(self.pid)
            await self._process.wait()
        if self._watch is not None:
            await self._watch
        await self._disconnect()

    async def _connected(self) -> EnvironmentClient:
        async with self._starting:
            if self._client is None or self.pid is None:
                await self._disconnect()
                self._client = await self._start()
            return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _start(self) -> EnvironmentClient:
        """Start the server; return a client of it. Raises RolloutError if it does not answer within START_S."""
        directory = os.environ.get(VARIABLE) or tempfile.gettempdir()
        socket = tempfile.mkdtemp(prefix="env-", dir=directory) + "/s"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    # -P: the directory of the program holds modules of megarl, which are none of its own.
                    str(self._spec.python), "-P", str(PROGRAM), stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                    env=self._variables(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise RolloutError(
                    f"the environment server cannot be started: {error}; run make setup-environments"
                ) from error
        assert process.stdin is not None
        asked = {"address": f"ipc://{socket}", "environment": self._spec.environment}
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        client = EnvironmentClient(f"ipc://{socket}")
        try:
            await self._answers(process, client)
        except BaseException:
            kill_session(process.pid)
            await client.close()
            raise
        self._watch = asyncio.get_running_loop().create_task(self._tell_end(process, client))
        return client

    async def _answers(self, process: asyncio.subprocess.Process, client: EnvironmentClient) -> None:
        until = time.monotonic() + START_S
        while not await client.health(LOOK_S):
            if process.returncode is not None:
                told = f"the environment server has ended with {process.returncode} at its start"
            elif time.monotonic() > until:
                told = f"a sample waited {START_S:.0f} s for the environment server to start"
            else:
                continue
            raise RolloutError(f"{told}; {self._log} ends with: {self._tail()}")

    async def _tell_end(self, process: asyncio.subprocess.Process, client: EnvironmentClient) -> None:
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing that it has started is left
            os.killpg(process.pid, signal.SIGKILL)
        client.lose(f"the environment server has ended with {code}; see {self._log}")

    def _variables(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        # As where the virtual environment is activated: verifiers' programs look for uv, which is installed in it.
        passed["PATH"] = os.pathsep.join([str(self._spec.python.parent), passed.get("PATH", os.defpath)])
        paths = os.pathsep.join(str(path.resolve()) for path in self._spec.paths)
        return {
            **passed,
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            TOKEN_VARIABLE: self._token,
            **self._spec.variables,
        }

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-_TAIL:]
        return "nothing"
