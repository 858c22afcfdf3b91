"""Asks a gateway by the training client of verifiers 0.4.0; for the Python of an environment that has it.

    python verifiers_client.py URL MODEL_DIR

The token is in GATEWAY_TOKEN. Prints one line of JSON: the exact tokens of the turn, as verifiers trains on them.
"""

from __future__ import annotations

import asyncio
import json
import sys

from verifiers.v1.clients.train import ChatDialect, TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.types import SamplingConfig


async def main(url: str, model: str) -> None:
    config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="GATEWAY_TOKEN", renderer_model_name=model)
    body = {"model": "stand-in", "messages": [{"role": "user", "content": "Hi"}]}
    sampling = SamplingConfig(max_tokens=50, temperature=1.0)
    answer = await TrainClient(config).get_response(ChatDialect(), body, sampling, session_id="verifiers")
    tokens = answer.tokens
    print(json.dumps({
        "content": answer.message.content, "prompt_ids": list(tokens.prompt_ids),
        "completion_ids": list(tokens.completion_ids), "logprobs": list(tokens.completion_logprobs),
    }))  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
