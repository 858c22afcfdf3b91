"""A replica without its engine: errors out of the engine's log, and no generation without weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import ReplicaFailed
from megarl.queue.trajectory import VersionSpan
from megarl.rollout import replica as replica_module
from megarl.rollout.replica import EngineReplica, ReplicaSpec, root_cause
from megarl.rollout.requests import GenerateRequest, SamplingSpec
from megarl.rollout.response_parts import EngineReport
from tests.support.pool import pool_config


def test_the_engines_own_error_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1509] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1510] rust.SafetensorError: invalid header length\n"
        "2026-11-21 01:26:22 ERROR megarl.rollout.replica: RuntimeError: Engine core initialization failed. See above\n"
    )
    assert root_cause(log) == "rust.SafetensorError: invalid header length"
    assert root_cause(log, start=log.stat().st_size) == ""
    log.write_text("(EngineCore pid=7) INFO 11-21 01:26:19 [core.py:1] no Error: here\n")
    assert root_cause(log) == ""


class FakeEngine:
    """The calls of AsyncLLM that a weight sync and a request make; it answers every request with one token."""

    errored = False

    def __init__(self) -> None:
        self.version = "default"

    async def start_weight_update(self) -> None:
        pass

    async def finish_weight_update(self, version: str) -> None:
        self.version = version

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def generate(self, prompt: Any, parameters: Any, request_id: str, priority: int = 0) -> AsyncIterator[Any]:
        span = SimpleNamespace(version=self.version, start=0, end=1)
        logprobs = SimpleNamespace(logprobs=[-0.5], token_ids=[7])
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7], logprobs=logprobs, weight_versions=[span], finish_reason="length")]
        )


REQUEST = GenerateRequest("r", [1, 2], SamplingSpec(max_tokens=1, temperature=1.0, stop_token_ids=()), seed=0)


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_weights: bool) -> EngineReplica:
    config = pool_config(tmp_path, rollout={"load_weights": load_weights})
    monkeypatch.setattr(replica_module, "redirect_output", lambda file: None)
    monkeypatch.setattr(replica_module, "engine_environment", lambda *_, **__: {})
    monkeypatch.setattr(EngineReplica, "_build", lambda self: FakeEngine())
    spec = ReplicaSpec(config.model_dump_json(), str(tmp_path), "run", cuda=False, max_model_len=64, supervisor=None)
    replica = EngineReplica(spec, 3)
    asyncio.run(replica.start())
    return replica


def test_an_engine_without_weights_refuses_to_generate_until_a_sync_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement of a lost engine starts in the same way, and refuses too."""

    async def run(replica: EngineReplica) -> EngineReport:
        with pytest.raises(ReplicaFailed, match="replica 3 has no weights yet"):
            await replica.generate([REQUEST], 60.0)
        await replica.set_weight_version("5")  # a label brings no weights
        await replica.start_weight_update()
        with pytest.raises(ReplicaFailed, match="has no weights yet"):
            await replica.generate([REQUEST], 60.0)
        await replica.finish_weight_update("6")
        return await replica.generate([REQUEST], 60.0)

    report = asyncio.run(run(started(tmp_path, monkeypatch, load_weights=False)))
    assert report.parts["r"].versions == (VersionSpan(6, 0, 1),)


def test_an_engine_that_has_read_the_weights_serves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = asyncio.run(started(tmp_path, monkeypatch, load_weights=True).generate([REQUEST], 60.0))
    assert report.parts["r"].response_ids == [7]
