"""GatewayActor: the process of the gateway, an async Ray actor that the supervisor starts, watches and replaces."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.chat.images import PromptImages
from megarl.chat.tokenize import load_tokenizer, stop_token_ids
from megarl.common.errors import RolloutError
from megarl.common.process.memory_tuning import begin_start, collect_rarely, exempt_present_objects
from megarl.common.process.output import redirect_output
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema import Config
from megarl.config.schema.job import GatewayConfig
from megarl.gateway.app import GatewayRoutes, GatewayServer, listen
from megarl.gateway.chats import Chats
from megarl.gateway.pool_client import ControllerClient
from megarl.gateway.request_fields import ModelLimits
from megarl.gateway.sessions import MOST_SESSIONS, MOST_TOKENS, Sessions
from megarl.gateway.text import ModelText
from megarl.gateway.token_file import gateway_token, read_token, write_gateway_file, write_token
from megarl.models.hf.model_files import HF_FILES
from megarl.models.hf.read_config import load_info
from megarl.rollout.engine.placement import HEAD_RESOURCE, HEAD_SHARE, ROLLOUT_RESOURCE
from megarl.rollout.engine.replica import ReplicaSpec

if TYPE_CHECKING:
    from ray.actor import ActorHandle

LOOPBACK = "127.0.0.1"
PORT_S = 10.0  # how long a gateway that has just died may hold the port


@dataclass(frozen=True)
class GatewaySpec:
    """The arguments of the gateway. `port`: 0 for a free one; `controller`: the controller's Ray name.

    `token_file`: has the token that clients send; None: the token is derived from the run's.
    """

    pool: ReplicaSpec
    controller: str
    port: int = 0
    token_file: str | None = None


def create_gateway(spec: GatewaySpec, *, own_head: bool) -> ActorHandle:
    """Create, but do not start, the actor. `own_head`: the run has its own Ray head, and the gateway is on its node."""
    import ray

    head = {HEAD_RESOURCE: HEAD_SHARE} if own_head else {}
    options = {"resources": {ROLLOUT_RESOURCE: 1, **head}, "num_cpus": 0, "max_concurrency": 100}
    return ray.remote(GatewayActor).options(namespace=spec.pool.namespace, **options).remote(spec)


class GatewayActor:
    """The actor that `create_gateway` creates; see the module's docstring."""

    def __init__(self, spec: GatewaySpec) -> None:
        begin_start()
        self.spec = spec
        self.config = Config.model_validate_json(spec.pool.config_json)
        self.run_dir = Path(spec.pool.run_dir)
        redirect_output(self.run_dir / "logs" / "gateway.log")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        spec.pool.watch_supervisor()

    async def start(self) -> dict[str, str | int]:
        """Open the gateway and write RUN_DIR/gateway.json; return its URL and port, and the file with the token.

        Raises RolloutError if the address cannot be used, ValueError if model or token file are wrong.
        """
        model = self.config.model.path
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        stops = tuple(stop_token_ids(model, tokenizer, self.config.sampling.stop_token_ids))
        info = load_info(model)
        limits = ModelLimits(self.spec.pool.max_model_len or info.max_positions, info.vocab_size, stops)
        timeouts = self.config.timeouts
        # A unique name: a controller forgets the requests of an earlier gateway.
        self._pool = ControllerClient(f"gateway-{uuid.uuid4().hex[:12]}", self._find_controller, timeouts.rpc_s)
        images = await asyncio.to_thread(PromptImages.of, model, info, self.config.model.vision)
        self._text = await asyncio.to_thread(ModelText, model, stops, self.config.agent.tool_format, images)
        sessions = Sessions(MOST_SESSIONS, MOST_TOKENS, 2 * timeouts.generate_s)
        names = model_names(model)
        chats = Chats(self._text, limits, names[0], self.config.gateway.image_hosts)
        token, token_file = self._token()
        routes = GatewayRoutes(self._pool, timeouts.generate_s, sessions, limits, chats, names, token)
        self._server = GatewayServer(routes)
        host, port = await self._open()
        self._pump = asyncio.create_task(self._pool.run())
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        write_gateway_file(self.run_dir, url, token_file)
        exempt_present_objects()
        collect_rarely()
        return {"url": url, "port": port, "token_file": str(token_file)}

    async def heartbeat(self) -> None:
        """Raise RolloutError if the gateway no longer receives news from the controller."""
        if self._pump.done():
            failure = None if self._pump.cancelled() else self._pump.exception()
            raise RolloutError(f"the gateway receives nothing from the controller: {failure}")

    async def shutdown(self) -> None:
        """Close the gateway."""
        await self._server.close()
        self._pump.cancel()
        self._text.close()

    def _token(self) -> tuple[str, Path]:
        if self.spec.token_file is not None:
            return read_token(Path(self.spec.token_file)), Path(self.spec.token_file)
        token = gateway_token()
        return token, write_token(self.run_dir, token)

    async def _open(self) -> tuple[str, int]:
        host = address_of(self.config.gateway)
        deadline = time.monotonic() + PORT_S
        while True:
            try:
                listener = listen(host, self.spec.port)
                break
            except OSError as error:
                if not self.spec.port or time.monotonic() > deadline:
                    message = f"the gateway cannot listen at {host}:{self.spec.port}: {error}; see gateway.host and gateway.port"  # noqa: E501
                    raise RolloutError(message) from error
                await asyncio.sleep(0.5)
        await self._server.start(listener)
        return host, int(listener.getsockname()[1])

    async def _find_controller(self) -> ActorHandle:
        import ray

        return await asyncio.to_thread(ray.get_actor, self.spec.controller, namespace=self.spec.pool.namespace)


def address_of(gateway: GatewayConfig) -> str:
    """Return the gateway's address: the configured one, else this node's address in a multi-node job, else loopback."""
    return gateway.host or os.environ.get(NODE_ADDRESS_VARIABLE) or LOOPBACK


def model_names(model: Path) -> tuple[str, ...]:
    """Return the model names for clients: its directory's name (for `hf`, the directory above it), and its path."""
    directory = model.absolute()
    name = directory.parent.name if directory.name == HF_FILES else directory.name
    return tuple(dict.fromkeys((name or str(model), str(model))))
