"""The process of an environment: its variables, its death, and the end of all that it has started."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import RolloutError
from megarl.environments import env_client
from megarl.environments.env_client import TOKEN_VARIABLE, EnvironmentLost, EnvironmentServer, EnvironmentSpec
from tests.support.checkout import ROOT

REQUEST = {"task_data": {}, "client": {}, "model": "m", "sampling": {}}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_client, "PROGRAM", ROOT / "tests/support/agents/environment_program.py")
    monkeypatch.setenv("A_SECRET_OF_THE_RUN", "1")


def run(tmp_path: Path, scenario: Callable[[EnvironmentServer], Awaitable[None]], taskset: str = "any") -> None:
    async def bounded() -> None:
        spec = EnvironmentSpec(Path(sys.executable), {"taskset": {"id": taskset}}, [tmp_path], {"EXTRA": "2"})
        server = EnvironmentServer(spec, tmp_path / "logs" / "environment.log", "secret")
        try:
            async with asyncio.timeout(60):
                await scenario(server)
        finally:
            await server.close()
        assert server.pid is None

    asyncio.run(bounded())


async def info(server: EnvironmentServer) -> dict[str, Any]:
    [trace] = await server.run(REQUEST)
    return dict(trace.values["info"])


def gone(pid: int) -> bool:
    """Wait until a process has ended; one that nobody has reaped yet has."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_has_what_it_needs_and_no_variable_of_the_run(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    async def scenario(server: EnvironmentServer) -> None:
        found.extend(await asyncio.gather(*(info(server) for _ in range(3))))

    run(tmp_path, scenario)
    assert len({each["pid"] for each in found}) == 1, "one process serves all runs"
    variables = found[0]["variables"]
    assert variables[TOKEN_VARIABLE] == "secret" and variables["PYTHONPATH"] == str(tmp_path)
    assert variables["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent), "as in an activated environment"
    assert variables["EXTRA"] == "2" and "A_SECRET_OF_THE_RUN" not in variables
    assert gone(found[0]["pid"]) and gone(found[0]["child"])


def test_a_server_that_has_died_loses_its_runs_and_another_one_is_started(tmp_path: Path) -> None:
    async def scenario(server: EnvironmentServer) -> None:
        first = await info(server)
        with pytest.raises(EnvironmentLost, match=r"the environment server has ended with 7; see .*environment.log"):
            await server.run(REQUEST | {"model": "die"})
        second = await info(server)
        assert second["pid"] != first["pid"] == first["pid"]
        assert await asyncio.to_thread(gone, first["child"]), "what it had started is killed"
        os.kill(second["pid"], 9)
        # The process is gone before this event loop notices; a run that is sent in between is lost with it.
        while server.pid is not None:
            await asyncio.sleep(0.01)
        third = await info(server)
        assert third["pid"] not in (first["pid"], second["pid"])

    run(tmp_path, scenario)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def scenario(server: EnvironmentServer) -> None:
        with pytest.raises(RolloutError, match=r"ended with 1 at its start; .* the taskset cannot be imported"):
            await info(server)

    run(tmp_path, scenario, "broken")


async def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = EnvironmentSpec(tmp_path / "python", {})
    with pytest.raises(RolloutError, match=r"cannot be started: .* run make setup-environments"):
        await EnvironmentServer(spec, tmp_path / "log", "t").run(REQUEST)
