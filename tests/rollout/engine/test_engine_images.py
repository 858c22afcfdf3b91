"""A real engine that is shown images: exact against transformers, by place and by hash, and after new weights."""

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megarl.common.errors import RequestFailed
from megarl.common.process import no_torchvision
from megarl.models.hf.image_patches import ImageProcessor
from megarl.queue.images import ImageRef, positions
from megarl.rollout.engine.engine_args import engine_args, engine_environment
from megarl.rollout.engine.engine_load import EngineMonitor
from megarl.rollout.engine.engine_requests import EngineRequests
from megarl.rollout.engine.image_inputs import ImageInputs
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.weights.receive import vllm_plugin
from tests.support.models.tiny_vision import make_tiny_vision, picture, vision_tokenizer
from tests.support.pool.pool import pool_config

pytestmark = pytest.mark.engine
FILES = [picture(90, 60, 1), picture(130, 170, 2)]
MOST = 64 * 28 * 28


class Sight:
    """An engine with a model that sees, its requests, and the model of transformers with the same weights."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.path = make_tiny_vision(directory)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()
        self.processor = ImageProcessor(self.path, MOST)
        self.tokenizer = vision_tokenizer()
        self.image_token = int(self.model.config.image_token_id)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.names = 0
        self.engine: Any = self.run(self._start(directory), 300)

    async def _start(self, directory: Path) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = pool_config(directory / "pool", self.path)
        vision = config.model.vision.model_copy(update={"max_pixels": MOST})
        rollout = config.rollout.model_copy(update={"load_weights": True})
        config = config.model_copy(
            update={"rollout": rollout, "model": config.model.model_copy(update={"vision": vision})}
        )
        os.environ.update(engine_environment(config.rollout, cuda=False, model=config.model.path))
        vllm_plugin.register()  # vLLM calls it once per process, which may have had an engine of another test
        arguments = engine_args(config, cuda=False, max_model_len=512)
        arguments |= {"worker_extension_cls": "tests.support.engines.loaded_weights.LoadedWeights", "dtype": "float32"}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.requests = EngineRequests(engine, 0, EngineMonitor(), 60.0, ImageInputs(self.processor))
        return engine

    def run(self, call: Any, timeout_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(timeout_s)

    def prompt(self, text: str, files: Sequence[bytes]) -> tuple[list[int], tuple[ImageRef, ...]]:
        ids: list[int] = []
        refs = []
        for number, part in enumerate(text.split("<image>")):
            if number:
                content = files[number - 1]
                refs.append(ImageRef(self.processor.hash(content), len(ids), *self.processor.size(content)))
                ids += [self.image_token] * refs[-1].tokens
            ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids, tuple(refs)

    def request(self, text: str, files: Sequence[bytes], tokens: int = 12, **fields: Any) -> GenerateRequest:
        ids, refs = self.prompt(text, files)
        self.names += 1
        sampling = SamplingSpec(max_tokens=tokens, temperature=1.0, stop_token_ids=(), ignore_eos=True)
        made = GenerateRequest(str(self.names), ids, sampling, seed=7, images=refs, files=tuple(files))
        return replace(made, **fields)

    def begin(self, *requests: GenerateRequest) -> Future[dict[str, ResponsePart]]:
        async def answer() -> dict[str, ResponsePart]:
            self.requests.start(requests)
            return await self.requests.report({each.request_id: 0 for each in requests}, 60)

        return asyncio.run_coroutine_threadsafe(answer(), self.loop)

    def ask(self, request: GenerateRequest) -> ResponsePart:
        return self.begin(request).result(60)[request.request_id]

    def expected(self, request: GenerateRequest, ids: list[int], files: Sequence[bytes], flat: bool) -> torch.Tensor:
        """Log-probs of `ids` after the first, with images at their places whatever ids the text has.

        `flat`: with positions as if images were text.
        """
        images, merge = request.images, self.processor.merge
        with torch.no_grad():
            hidden = self.model.get_input_embeddings()(torch.tensor([ids]))
            if files:
                pixels = torch.cat([self.normalised(each) for each in files])
                grids = torch.tensor([[1, merge * each.height, merge * each.width] for each in images])
                rows = torch.tensor([place for each in images for place in range(each.offset, each.end)])
                hidden[0, rows] = self.model.model.visual(pixels, grid_thw=grids).pooler_output
            places = torch.from_numpy(positions(len(ids), [] if flat else images))[:, None]
            logits = self.model(inputs_embeds=hidden, position_ids=places).logits[0].float()
        return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def normalised(self, content: bytes) -> torch.Tensor:
        patches = torch.from_numpy(self.processor.patches(content)).reshape(-1, 3, 2 * self.processor.patch**2) / 255
        mean, std = torch.tensor(self.processor.mean)[:, None], torch.tensor(self.processor.std)[:, None]
        return ((patches - mean) / std).flatten(1)

    def gap(
        self, request: GenerateRequest, answer: ResponsePart, files: Sequence[bytes] | None = None,
        last: int | None = None, flat: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """|Difference| of the log-probs of (the last) sampled tokens; `files`: other ones than the request's."""
        shown = [bytes(each) for each in (request.files if files is None else files)]  # type: ignore[arg-type]
        expected = self.expected(request, request.prompt_ids + answer.response_ids, shown, flat)
        length = len(answer.response_ids)
        return (torch.tensor(answer.logprobs) - expected[-length:]).abs()[-(last or length) :]


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sight]:
    made = Sight(tmp_path_factory.mktemp("sight"))
    yield made
    made.loop.call_soon_threadsafe(made.engine.shutdown)


def close(gap: torch.Tensor) -> bool:
    return float(gap.mean()) <= 1e-5 and float(gap.max()) <= 1e-4


@pytest.mark.parametrize(
    ("text", "files"), [("See <image>.", FILES[:1]), ("<image> or <image>?", FILES), ("No picture.", [])]
)
def test_log_probs_equal_those_of_transformers(sight: Sight, text: str, files: list[bytes]) -> None:
    request = sight.request(text, files)
    answer = sight.ask(request)
    assert len(answer.response_ids) == 12
    assert close(sight.gap(request, answer))
    if files:  # the comparison would notice
        assert not close(sight.gap(request, answer, [picture(90, 60, 9), *files[1:]]))
        assert not close(sight.gap(request, answer, flat=True))


def test_another_image_of_the_same_size_under_the_same_ids(sight: Sight) -> None:
    """The prefix cache and the encoder cache know an image by its hash."""
    text = "In a triangle the angles sum to 180 degrees. " * 3 + "<image> Which is largest?"
    for content in (FILES[0], picture(90, 60, 9), FILES[0]):
        request = sight.request(text, [content])
        assert close(sight.gap(request, sight.ask(request)))


def test_a_sampled_image_token_is_text(sight: Sight) -> None:
    """So a response goes on on another engine, and the trainer agrees, whatever the policy samples."""
    first = sight.request("See <image>.", FILES[:1])
    continued = replace(first, request_id="continued", prompt_ids=[*first.prompt_ids, sight.image_token, 65, 66])
    assert close(sight.gap(continued, sight.ask(continued)))


def test_a_file_that_is_not_the_images_fails_its_request_alone(sight: Sight) -> None:
    request = replace(sight.request("See <image>.", [picture(90, 60, 5)]), files=(picture(90, 60, 6),))
    with pytest.raises(RequestFailed, match="hash"):
        sight.ask(request)
    fine = sight.request("See <image>.", FILES[:1])
    assert close(sight.gap(fine, sight.ask(fine)))


@pytest.mark.parametrize("mistake", ["normalised twice", "expanded twice"])
def test_what_is_done_twice_shows(sight: Sight, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """Neither is an error in vLLM. The picture is a new one, so that nothing is cached under its hash."""
    content = picture(90, 60, 30 + len(mistake))
    if mistake == "normalised twice":
        once = ImageInputs._normalised
        mean, std = (torch.tensor(each)[:, None] for each in (sight.processor.mean, sight.processor.std))

        def again(self: ImageInputs, patches: Any) -> torch.Tensor:
            by_channel = once(self, patches).view(len(patches), 3, -1)
            return ((by_channel - mean) / std).flatten(1)

        monkeypatch.setattr(ImageInputs, "_normalised", again)
    else:

        def expanded(self: ImageInputs, request: GenerateRequest, patches: Any) -> dict[str, Any]:
            shown = Image.open(io.BytesIO(content)).convert("RGB")
            return {"prompt_token_ids": list(request.prompt_ids), "multi_modal_data": {"image": [shown]}}

        monkeypatch.setattr(ImageInputs, "_input", expanded)
    request = sight.request("See <image>.", [content])
    assert not close(sight.gap(request, sight.ask(request)))


def test_new_weights_of_the_tower_need_an_empty_encoder_cache(sight: Sight, tmp_path: Path) -> None:
    """A response in flight goes on after a pause that clears the caches, and a later one is of the new weights."""
    running = sight.begin(request := sight.request("See <image>.", FILES[:1], tokens=150))
    sight.run(sight.engine.pause_generation(mode="keep", clear_cache=True))
    with torch.no_grad():
        for parameter in sight.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    sight.model.save_pretrained(tmp_path)
    load = sight.engine.collective_rpc("load_file", args=(str(tmp_path / "model.safetensors"),))
    sight.run(load)
    sight.run(sight.engine.resume_generation())
    assert close(sight.gap(request, running.result(60)[request.request_id], last=20))
    sight.ask(later := sight.request("Look: <image>.", FILES[:1]))
    with torch.no_grad():
        for parameter in sight.model.model.visual.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    sight.model.save_pretrained(tmp_path)
    sight.run(sight.engine.pause_generation(mode="keep", clear_cache=False))
    sight.requests.keep_cache()
    sight.run(sight.engine.collective_rpc("load_file", args=(str(tmp_path / "model.safetensors"),)))
    sight.run(sight.engine.resume_generation())
    stale = sight.request("Look: <image>.", FILES[:1])
    assert stale.prompt_ids == later.prompt_ids and not close(sight.gap(stale, sight.ask(stale)))
    sight.run(sight.engine.reset_encoder_cache())
    sight.requests.keep_cache()  # so that nothing of the stale request is used again
    fresh = sight.request("Look: <image>.", FILES[:1])
    assert close(sight.gap(fresh, sight.ask(fresh)))


@pytest.mark.parametrize("left_out", [None, *(each.__name__ for each in no_torchvision.REPLACEMENTS)])
def test_each_replacement_for_torchvision_is_needed(tmp_path: Path, left_out: str | None) -> None:
    """Without one of them vLLM cannot look at the class of a model that sees, or not load its processor."""
    program = f"""
from megarl.common.process import no_torchvision as n
n.REPLACEMENTS = tuple(each for each in n.REPLACEMENTS if each.__name__ != {left_out!r})
n.apply()
import vllm.model_executor.models.qwen2_5_vl, vllm.model_executor.models.qwen3_vl
from transformers import Qwen2_5_VLProcessor
Qwen2_5_VLProcessor.from_pretrained({str(make_tiny_vision(tmp_path))!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode == 0) == (left_out is None), ended.stderr[-2000:]
