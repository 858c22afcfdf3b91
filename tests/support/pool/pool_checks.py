"""Helpers for tests of the real pool: serving a version, checking rows against transformers, counting processes."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.cluster.pool.pool_process import read_state
from megarl.common.process.processes import ProcessId, descendants, is_alive
from megarl.queue.trajectory import Trajectory
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import ResponsePart
from tests.support.pool.pool import TestPool
from tests.support.waiting import wait_until

GONE_S = 120.0


def serve(pool: TestPool, version: int) -> None:
    """Do what the trainer does around a weight sync, here without new weights."""
    pool.client.announce(version)  # a group can finish with tokens of the version before the last line is reached
    for replica in pool.client.engine_handles().replicas():
        replica.call("set_weight_version", str(version), timeout_s=60)
    pool.client.set_version(version)


def inside(replica: Any, function: Callable[[Any], Any]) -> Any:
    """Return what a function of the actor returns in the actor's process."""
    import ray

    return ray.get(replica._actor.__ray_call__.remote(function), timeout=60)


def process_of(replica: Any) -> ProcessId:
    """The process of a replica's actor."""
    return ProcessId.of(inside(replica, lambda actor: os.getpid()))


def generate(replica: Any, requests: Sequence[GenerateRequest]) -> list[ResponsePart]:
    """The whole responses of a replica to requests, in their order."""
    parts, _ = replica.call("generate", list(requests), 60.0, timeout_s=60)
    assert all(part.finish_reason is not None for part in parts.values())
    return [parts[request.request_id] for request in requests]


@functools.cache
def reference_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reference_logprobs(pool: TestPool, prompt_ids: list[int], response_ids: list[int]) -> torch.Tensor:
    """Log-probs of the response by plain transformers in fp32, at the sampling temperature."""
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        logits = reference_model(pool.config.model.path)(ids).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = (logits.double() / pool.config.sampling.temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response_ids)[:, None])[:, 0]


def check_rows(pool: TestPool, rows: list[Trajectory], version: int) -> None:
    stop = 2  # <|im_end|>
    tokens = 0
    for row in rows:
        assert row.status == "ok", row.failure
        assert [(span.version, span.start, span.end) for span in row.versions] == [(version, 0, len(row.response_ids))]
        assert (row.response_ids[-1] == stop) == (row.finish_reason == "stop")
        assert stop not in row.response_ids[:-1] and len(row.response_ids) <= pool.config.sampling.max_tokens
        assert 0.0 <= row.reward <= 1.0
        expected = reference_logprobs(pool, row.prompt_ids, row.response_ids)
        assert float((torch.tensor(row.rollout_logprobs).double() - expected).abs().max()) <= 1e-4, row.key
        tokens += len(row.rollout_logprobs)
    assert tokens == sum(len(row.response_ids) for row in rows) > 0


def command_of(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")


def everything(pool: TestPool) -> set[ProcessId]:
    found = descendants(pool.handle.process.pid) | {pool.handle.process}
    assert len(found) >= 8  # gcs, raylet, agents, replica, engine, controller, queue
    return found


def private_of(pool: TestPool) -> Path:
    """The pool's private directory."""
    state = read_state(pool.config.run_dir)
    assert state is not None
    return Path(state["private_directory"])


def assert_all_go(processes: set[ProcessId], kill: Callable[[], None]) -> None:
    kill()
    wait_until(lambda: not any(map(is_alive, processes)), GONE_S, "every process of the pool to go")
