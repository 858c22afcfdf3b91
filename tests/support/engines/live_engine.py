"""A real vLLM engine in this process that answers prompts; and its reference."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import live_engine


@dataclass(frozen=True)
class Response:
    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]


class LiveReplica(live_engine.LiveReplica):
    """One that also answers prompts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun: dict[str, asyncio.Event] = {}

    async def _abandon_weight_update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert self.weights.in_session
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._engine.finish_weight_update(None)
        self.weights.abandoned()

    def ask_workers(self, method: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Return what a method of `worker_extension_cls` returns in each worker."""
        return list(self.run(self._engine.collective_rpc(method, args=args), timeout_s))

    def version(self) -> str:
        return str(self.run(self._engine.get_weight_version(), 30))

    def generate(self, prompt: list[int], request_id: str, max_tokens: int = 24, seed: int | None = None) -> Any:
        """A future of a Response: greedy, or sampled with `seed`."""
        call = self._generate(prompt, request_id, max_tokens, seed)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def wait_begun(self, *request_ids: str) -> None:
        """Wait until each request has a token."""
        for each in request_ids:
            self.run(self._has_token(each), 120)

    async def _has_token(self, request_id: str) -> None:
        await self._begun[request_id].wait()

    async def _generate(self, prompt: list[int], request_id: str, max_tokens: int, seed: int | None) -> Response:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
        final, self._begun[request_id] = None, asyncio.Event()
        async for output in self._engine.generate({"prompt_token_ids": prompt}, parameters, request_id):
            final = output
            self._begun[request_id].set()
        assert final is not None
        (result,) = final.outputs
        ids = list(result.token_ids)
        logprobs = [row[token].logprob for row, token in zip(result.logprobs, ids, strict=True)]
        return Response(ids, logprobs, [(s.version, s.start, s.end) for s in result.weight_versions])


def reference(
    model: Path, prompt: list[int], response: list[int], old: Path | None = None, cached: int = 0
) -> tuple[list[int], torch.Tensor]:
    """(greedy tokens, log-probs of the response's tokens) of `transformers`, teacher-forced.

    `old`: the model whose KV cache of the prompt and the first `cached` tokens the other tokens follow; the results
    for these `cached` tokens are the old model's.
    """
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        if old is None:
            logits = policy(torch.tensor([prompt + response])).logits[0].float()
        else:
            before = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32).eval()
            known = before(torch.tensor([prompt + response[:cached]]), use_cache=True)
            rest = policy(torch.tensor([response[cached:]]), past_key_values=known.past_key_values)
            logits = torch.cat([known.logits[0], rest.logits[0]]).float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
