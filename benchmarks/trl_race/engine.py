"""A bare vLLM engine: `python -m benchmarks.trl_race.engine CONFIG.yaml RESPONSES RESULT.json`.

It samples the responses that a run with this config would sample first, with the same engine arguments and seeds,
without Ray, rewards, queue or trainer. The result holds the number of responses per second; the first tenth, during
which the engine warms up, does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path


async def rate(config_path: Path, responses: int) -> float:
    """Return responses per second, all of them requested at once."""
    from megarl.config.checks.sections import max_sequence_tokens
    from megarl.config.loading.load import load_config
    from megarl.models.hf.read_config import load_info
    from megarl.rollout.engine.engine_args import engine_args, engine_environment
    from megarl.rollout.engine.messages import request_seed
    from megarl.rollout.tasks.prompts import PromptSource

    config = load_config(config_path, ["rollout.load_weights=true"])
    os.environ.update(engine_environment(config.rollout, cuda=False))
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    length = max_sequence_tokens(config, load_info(config.model.path))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(config, cuda=False, max_model_len=length)))
    source, samples = PromptSource(config), config.batch.samples_per_group
    ends: list[float] = []

    async def one(number: int) -> None:
        group, index = divmod(number, samples)
        parameters = SamplingParams(
            temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens,
            stop_token_ids=list(source.stop_token_ids), seed=request_seed(config.run.seed, group, index),
            logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = {"prompt_token_ids": source.draw(group).ids}
        async for _ in engine.generate(prompt, parameters, request_id=str(number)):
            pass
        ends.append(time.monotonic())

    await asyncio.gather(*(one(number) for number in range(responses)))
    engine.shutdown()
    first = responses // 10
    return (responses - 1 - first) / (ends[-1] - ends[first])


if __name__ == "__main__":
    measured = asyncio.run(rate(Path(sys.argv[1]), int(sys.argv[2])))
    Path(sys.argv[3]).write_text(json.dumps({"responses_per_s": measured}))
