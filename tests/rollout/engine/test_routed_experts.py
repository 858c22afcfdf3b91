"""A real engine returns the experts that its routers choose, for every token that it has read, whatever it did between.

The reference is plain transformers in fp32, whose routers choose the same experts.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.queue.routes import Routes, RoutesSpec
from megarl.rollout.engine.engine_load import EngineMonitor
from megarl.rollout.engine.engine_requests import EngineRequests
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart, continue_request, join_parts
from tests.support.engines.live_engine import LiveReplica
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.engine
LAYERS, EXPERTS, TOPK = 4, 8, 2
DENSE = 1  # a layer without experts
SPEC = RoutesSpec(LAYERS - 1, TOPK, EXPERTS)
BLOCKS = 9  # of 32 tokens: too few for all requests at once


class Engine:
    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.live = LiveReplica(
            model, experts=True, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS,
            block_size=32, max_num_batched_tokens=64, max_model_len=128,
        )  # fmt: skip
        layers = [layer != DENSE for layer in range(LAYERS)]
        self.requests = EngineRequests(self.live._engine, 0, EngineMonitor(), 600.0, routed=layers)

    def run(self, call: Any) -> Any:
        return self.live.run(call, 300.0)

    def answer(self, requests: list[GenerateRequest], every_s: float = 0.02, clear: bool = False) -> list[ResponsePart]:
        """All parts of each request joined, as they come; `clear`: the cache is emptied while they are under way."""
        return self.run(self._answer(requests, every_s, clear))

    async def _answer(self, requests: list[GenerateRequest], every_s: float, clear: bool) -> list[ResponsePart]:
        self.requests.start(requests)
        so_far = {request.request_id: ResponsePart() for request in requests}
        self.reports = 0
        while open_ones := {n: len(p.response_ids) for n, p in so_far.items() if p.finish_reason is None}:
            parts = await self.requests.report(open_ones, every_s)
            self.reports += 1
            so_far |= {name: join_parts(so_far[name], part) for name, part in parts.items()}
            if clear and any(len(part.response_ids) > 0 and part.finish_reason is None for part in so_far.values()):
                await self.live._pause(clear_cache=True)
                await self.live._resume()
                clear = False
        assert not clear, "every response was complete before the cache could be emptied"
        return [so_far[request.request_id] for request in requests]

    def chosen(self, ids: list[int]) -> np.ndarray:
        """The experts of transformers for all tokens but the last, [tokens, layers, K]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        return torch.stack([each.topk(TOPK, -1).indices for each in logits], 1)[:-1].numpy()

    def check(self, prompt: list[int], part: ResponsePart) -> None:
        tokens = [*prompt, *part.response_ids]
        assert SPEC.problem(part.routes, len(tokens) - 1) == ""
        assert part.routes is not None and part.routes.experts_TLK.dtype == np.uint8
        assert np.array_equal(np.sort(part.routes.experts_TLK, -1), np.sort(self.chosen(tokens), -1))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("routed") / "model"
    made = Engine(
        make_tiny_model(
            directory,
            "qwen3_moe",
            num_hidden_layers=LAYERS,
            num_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            mlp_only_layers=[DENSE],
        )
    )
    yield made
    made.live.shutdown()


def request(name: str, prompt: list[int], tokens: int) -> GenerateRequest:
    """Without a seed: on a CPU vLLM dies of one if a prompt is read in parts (`engine_args._whole_prompts`)."""
    return GenerateRequest(name, prompt, SamplingSpec(tokens, 1.0, (), ignore_eos=True), routes_from=0)


def prompts(count: int, length: int, same: int) -> list[list[int]]:
    """Prompts of ragged lengths with the first `same` tokens in common."""
    rng = np.random.default_rng(7)
    head = rng.integers(3, 90, same).tolist()
    return [head + rng.integers(3, 90, length + number).tolist() for number in range(count)]


def test_every_token_has_the_experts_that_its_routers_chose(engine: Engine) -> None:
    """With a cached beginning, prompts read in parts, several requests in a step, and preempted ones."""
    asked = prompts(6, 9, same=40)
    for turn in range(2):  # the second time most of each prompt is cached
        made = engine.answer([request(f"{turn}-{n}", each, 40) for n, each in enumerate(asked)])
        assert engine.reports > 2, "they came in one part"
        for prompt, part in zip(asked, made, strict=True):
            engine.check(prompt, part)


def test_rows_in_another_order_are_found(engine: Engine) -> None:
    asked = prompts(2, 9, same=0)
    one, other = engine.answer([request(f"order-{n}", each, 12) for n, each in enumerate(asked)])
    assert one.routes is not None and other.routes is not None
    engine.check(asked[0], one)
    rows_TLK = one.routes.experts_TLK
    for wrong_TLK in (np.roll(rows_TLK, 1, 0), rows_TLK[:, ::-1], other.routes.experts_TLK[: len(rows_TLK)]):
        with pytest.raises(AssertionError, match="array_equal"):
            engine.check(asked[0], replace(one, routes=Routes(wrong_TLK)))


def test_what_was_generated_keeps_its_experts_when_the_cache_is_emptied(engine: Engine) -> None:
    asked = prompts(3, 8, same=34)
    made = engine.answer([request(f"clear-{n}", each, 48) for n, each in enumerate(asked)], clear=True)
    for prompt, part in zip(asked, made, strict=True):
        engine.check(prompt, part)


def test_another_engine_goes_on_with_the_experts_that_are_missing(engine: Engine) -> None:
    (prompt,) = prompts(1, 20, same=0)
    whole = request("first", prompt, 24)
    (first,) = engine.answer([replace(whole, sampling=replace(whole.sampling, max_tokens=10))])
    first = replace(first, finish_reason=None)
    rest = continue_request(replace(whole, request_id="rest"), first)
    assert rest.routes_from == len(prompt) + 9
    (second,) = engine.answer([rest])
    assert second.routes is not None and len(second.routes) == 14
    engine.check(prompt, join_parts(first, second))


def test_nobody_gets_experts_who_does_not_ask_for_them(engine: Engine) -> None:
    asked = prompts(2, 8, same=0)
    made = engine.answer([replace(request(f"eval-{n}", each, 24), routes_from=None) for n, each in enumerate(asked)])
    assert [len(part.response_ids) for part in made] == [24, 24] and all(part.routes is None for part in made)


def test_without_a_prefix_cache_the_experts_of_all_running_tokens_have_room() -> None:
    """As with latent attention on a CPU: no block gets a hash, so none leaves vLLM's buffer."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

    from megarl.rollout.engine.routed_experts import _hold_whole_requests

    def fill(*, cached: bool) -> None:
        connector = SimpleNamespace(_buffer=RoutedExpertsBuffer(np.dtype("uint8"), (2, 4), 16, 4, 64, 1))
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            cache_config=SimpleNamespace(enable_prefix_caching=cached),
            model_config=SimpleNamespace(max_model_len=256),
        )
        _hold_whole_requests(connector, config)
        for start in range(0, 256, 8):
            for request in range(4):
                for _, rows in connector._buffer.capture(request, start, np.zeros((8, 2, 4), np.uint8)):
                    connector._buffer.retain_block(rows)

    fill(cached=False)
    with pytest.raises(AssertionError, match="exhausted"):
        fill(cached=True)
