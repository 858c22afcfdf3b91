"""Plays an environment in the real environment server of verifiers 0.4, over a stand-in gateway.

make nightly-environments; or MEGARL_VERIFIERS_PYTHON=DIR/bin/python with requirements/environments.lock installed.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import load_tokenizer
from megarl.environments.verifiers_loop import Verifiers
from megarl.queue.trajectory import Trajectory
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from tests.support.agents.harness_context import SAMPLING, Context, announce
from tests.support.checkout import ROOT
from tests.support.gateway.gateway_stand_in import StandInGateway

VARIABLE = "MEGARL_VERIFIERS_PYTHON"
EXAMPLES = ROOT / "examples/rl/environments"
TASKSETS = ROOT / "tests/support/verifiers_tasksets"
needs_verifiers = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")
MAX_TOKENS = 400
PLAY_S = 480.0


def shipped() -> Path:
    """The folder of the tasksets in verifiers' own source package; make setup-environments lays it there."""
    return Path(os.environ[VARIABLE]).parents[1] / "source/tests/v1/fixtures"


def exported(
    directory: Path, taskset: str, count: int, config: Mapping[str, Any] | None = None, skip: int = 0,
    variables: Mapping[str, str] | None = None, name: str = "rows",
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows that the exporter writes to `directory/NAME.jsonl`."""
    file = directory / f"{name}.jsonl"
    command = [os.environ[VARIABLE], str(EXAMPLES / "export_tasks.py"), taskset, "--count", str(count)]
    command += ["--skip", str(skip), "--out", str(file), "--config", json.dumps(config or {})]
    env = {**os.environ, "PYTHONPATH": str(shipped()), **(variables or {})}
    subprocess.run(command, check=True, timeout=300, capture_output=True, env=env)
    return [json.loads(line) for line in file.read_text().splitlines()]


def play(
    gateways: Callable[..., StandInGateway], chat_model: Path, run_dir: Path, taskset: str, rows: Sequence[dict[str,
    Any]],
    say: Callable[[str], str | list[int]], **options: Any,
) -> tuple[list[list[Trajectory]], StandInGateway]:  # fmt: skip
    """Run one sample for each row; `options`: of `Verifiers`.

    `say(prompt text)`: the model's answer without its end, as text or as the tokens that are sampled.
    """
    tokenizer = load_tokenizer(chat_model)

    def answer(request: GenerateRequest) -> list[int]:
        said = say(tokenizer.decode(request.prompt_ids))
        ids = tokenizer(said, add_special_tokens=False)["input_ids"] if isinstance(said, str) else said
        return [*ids, 2]

    gateway = gateways(answer)
    announce(gateway, run_dir)
    loop = Verifiers(taskset, os.environ[VARIABLE], [str(EXAMPLES), str(TASKSETS), str(shipped())], **options)

    async def all_rows() -> list[list[Trajectory]]:
        contexts = [Context(run_dir, row=row) for row in rows]
        for index, ctx in enumerate(contexts, 1):
            ctx.sample_index = index  # by which the gateway ends the earlier attempts at a sample
            ctx.prompt.sampling = SamplingSpec(MAX_TOKENS, 1.0, SAMPLING.stop_token_ids)
        try:
            async with asyncio.timeout(PLAY_S):
                return await asyncio.gather(*(loop.run(ctx) for ctx in contexts))  # type: ignore[arg-type]
        finally:
            await loop.close()

    return asyncio.run(all_rows()), gateway
