"""The agent loop of an environment of verifiers, which runs in its own process and virtual environment.

The environment acts through the gateway: its server gets a base URL with the sample's session. The reward comes from
the environment's trace; tokens, log-probs and versions come from the session.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from megarl.common.errors import RolloutError
from megarl.config.schema.agent import ACT_TIMEOUT_S
from megarl.environments.env_client import (
    TOKEN_VARIABLE,
    EnvironmentFailed,
    EnvironmentServer,
    EnvironmentSpec,
    TraceSoFar,
)
from megarl.environments.gateway_client import CALL_S, GatewayClient
from megarl.environments.harness_loop import Harness, SampleFailed
from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardResult
from megarl.rollout.agents.agent_loop import AgentContext

logger = logging.getLogger(__name__)

TASK_FIELD = "task_data"


class Verifiers:
    """Runs an environment of verifiers for each sample. Data rows have the task in the field `task_data`."""

    def __init__(
        self,
        taskset: str,
        python: str = ".venv-environments/bin/python",
        paths: Sequence[str] = (),
        taskset_config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        client: Literal["eval", "train"] = "eval",
        renderer: str | None = None,
        renderer_config: Mapping[str, Any] | None = None,
        timeout_s: float = ACT_TIMEOUT_S,
        attempts: int = 3,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`taskset`: the module of the taskset, in one of `paths` or installed with `python`.

        `taskset_config`, `environment`: more fields of verifiers' `[env.taskset]` and `[env]`. `client`: `eval` sends
        messages to the gateway, `train` sends tokens that verifiers makes with the tokenizer in the directory
        `renderer` and the renderer of `renderer_config`, verifiers' config, such as
        `{name: qwen3, thinking_retention: all}`. `timeout_s`, `attempts`: see `Harness`; keep the first below
        `timeouts.generate_s`. `variables`: more environment variables of the server, which inherits only basic ones.

        Raises ValueError for a missing Python or directory, and for a client without its renderer.
        """
        if not Path(python).is_file():
            raise ValueError(f"agent.kwargs.python: there is no {python}; run make setup-environments")
        if missing := [path for path in paths if not Path(path).is_dir()]:
            raise ValueError(f"agent.kwargs.paths: there is no directory {missing[0]}")
        if problem := client_problem(client, renderer, renderer_config):
            raise ValueError(problem)
        content = {**(environment or {}), "taskset": {**(taskset_config or {}), "id": taskset}}
        # Not resolved: the Python of a virtual environment is a link, and finds its packages by its own path.
        absolute = [Path(path).absolute() for path in paths]
        self._spec = EnvironmentSpec(Path(python).absolute(), content, absolute, dict(variables or {}))
        self._client: dict[str, Any] = {"type": client}
        if client == "train":
            self._client |= {"renderer_model_name": renderer, "renderer": dict(renderer_config or {})}
        self._timeout_s, self._attempts = timeout_s, attempts
        self._server: EnvironmentServer | None = None
        self._model = ""
        self._reported_parts = False

    async def run(self, ctx: AgentContext) -> list[Trajectory]:
        """See `AgentLoop.run` and `Harness.run`."""
        run_dir = ctx.toolbox.run_dir
        if run_dir is None:
            raise RolloutError("environments act through the gateway of the run; set gateway.enabled: true")
        if self._server is None:
            token = GatewayClient(run_dir).token
            self._server = EnvironmentServer(self._spec, run_dir / "logs" / "environment.log", token)
        act = functools.partial(self._act, self._server)
        rows = await Harness(act, self._timeout_s, self._attempts, name="the environment").run(ctx)
        if len(rows) > 1 and self._client["type"] == "train" and not self._reported_parts:
            self._reported_parts = True
            logger.warning(
                "sample %d:%d became %d rows: the environment restarted a dialogue, or verifiers tokenized an earlier "
                "turn again; see docs/rollout/environments.md on renderer_config. This is logged once",
                ctx.group_id, ctx.sample_index, len(rows),
            )  # fmt: skip
        return rows

    async def close(self) -> None:
        """End the environment's process. It also ends with the process of the loop."""
        if self._server is not None:
            await self._server.close()

    async def _act(
        self, server: EnvironmentServer, base_url: str, token: str, session: str, row: dict[str, Any]
    ) -> RewardResult:
        task = row.get(TASK_FIELD)
        if not isinstance(task, dict):
            raise ValueError(f"the data row has no object {TASK_FIELD!r}; make the rows with export_tasks.py")
        if not self._model:
            self._model = await _model_name(base_url, token)
        client = {
            **self._client,
            "base_url": f"{base_url.removesuffix('/v1')}/in/{session}/v1",
            "api_key_var": TOKEN_VARIABLE,
        }
        try:
            traces = await server.run({"task_data": task, "client": client, "model": self._model, "sampling": {}})
        except EnvironmentFailed as error:
            raise SampleFailed(f"the environment failed: {error}") from error
        return reward_of(traces)


def client_problem(client: str, renderer: str | None, renderer_config: Mapping[str, Any] | None) -> str | None:
    """Return what is wrong with the arguments of verifiers' client, or None.

    verifiers finds a renderer by the model's exact name on the hub. For a directory it silently uses one that tokenizes
    earlier turns of a dialogue again and knows no tools.
    """
    if client not in ("eval", "train"):
        return f"agent.kwargs.client: {client!r} is neither eval nor train"
    if client == "eval":
        if renderer is None and renderer_config is None:
            return None
        return "agent.kwargs.renderer: client: eval makes no tokens; set client: train, or remove it"
    if renderer is None:
        return "agent.kwargs.renderer: client: train makes the tokens itself; name the model's directory"
    if (renderer_config or {}).get("name", "auto") == "auto":
        return (
            "agent.kwargs.renderer_config: for a model's directory client: train would tokenize the earlier turns of "
            "each dialogue again, and refuse tools; name the renderer of the model's family, such as "
            "{name: qwen3, thinking_retention: all}, or {name: default} if each dialogue is one turn without tools"
        )
    return None


def reward_of(traces: Sequence[TraceSoFar]) -> RewardResult:
    """Return the mean reward of the traces of a run, with the individual rewards and metrics as components.

    Raises SampleFailed if there is no trace, or if one ended with an error.
    """
    if not traces:
        raise SampleFailed("the environment has made no trace")
    for trace in traces:
        if not trace.values.get("ok"):
            last = trace.errors[-1] if trace.errors else {}
            message = f"{last.get('type')}: {last.get('message')}" if last else "it did not complete"
            raise SampleFailed(f"the environment failed: {message}")
    components: dict[str, float] = {}
    total = 0.0
    for trace in traces:
        for name, reward in (trace.values.get("rewards") or {}).items():
            if reward is not None:
                total += reward["score"] * reward["weight"]
                components[name] = components.get(name, 0.0) + float(reward["score"]) / len(traces)
        for name, value in (trace.values.get("metrics") or {}).items():
            if isinstance(value, int | float):
                components[name] = components.get(name, 0.0) + float(value) / len(traces)
    return RewardResult(total / len(traces), components)


async def _model_name(base_url: str, token: str) -> str:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=CALL_S)) as http:
        async with http.get(f"{base_url}/models") as answer:
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
