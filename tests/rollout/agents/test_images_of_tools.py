"""Tools that answer with images: the next request and the trajectory have them, at the same places."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.chat.images import PromptImages
from megarl.common.errors import RolloutError, ToolFailed
from megarl.config.schema import Config, VisionConfig
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.resume.group_progress import INTERRUPTED, UnfinishedGroup, prompt_digest
from megarl.rollout.resume.journal_records import decode_unfinished, encode_unfinished
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.tools.tool import ToolAnswer
from tests.support.agents import scripted_agents
from tests.support.agents.scripted_agents import Counter, KeepingRewards, ScriptedBatcher, agent_runner, toolbox_of
from tests.support.models.tiny_vision import IMAGE, TEMPLATE, make_tiny_vision, picture, vision_tokenizer
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALL = scripted_agents.call_text("draw", seed=4)


@dataclass
class Draw(Counter):
    """Draws pictures, a new one with each call if it is `fickle`."""

    name: str = "draw"
    pictures: int = 1
    fickle: bool = False
    svg: bool = False

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        seed = arguments["seed"] + len(self.calls) * self.fickle
        answer = await super().call({**arguments, "a": 1, "b": 1}, timeout_s=timeout_s)
        files = tuple(b"<svg/>" if self.svg else picture(90, 60, seed + each) for each in range(self.pictures))
        return replace(answer, text=f"<image>{answer.text}" * self.pictures, images=files)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> PromptImages:
    model = make_tiny_vision(tmp_path_factory.mktemp("model"))
    raw = json.loads((model / "config.json").read_text())
    found = PromptImages.of(model, SimpleNamespace(vision=object(), raw=raw), VisionConfig(images_per_prompt=3))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.fixture
def toolbox(images: PromptImages, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a toolbox of a model that sees, whose tokens the scripted model samples."""
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = TOOLS + TEMPLATE
    monkeypatch.setattr(scripted_agents, "TOKENIZER", tokenizer)
    monkeypatch.setattr(scripted_agents, "END", tokenizer.eos_token_id)
    return lambda *tools, **bounds: replace(toolbox_of(*tools, **bounds), images=images)


@pytest.fixture
def config() -> Config:
    return config_of("model", batch={"groups": 2, "samples_per_group": 2})


def runner_of(
    config: Config, toolbox: Toolbox, turns: list[str], pause: Any = None
) -> tuple[GroupRunner, ScriptedBatcher]:
    batcher = ScriptedBatcher(turns, pause=pause)
    return agent_runner(config, ToolAgent(), toolbox, batcher, KeepingRewards(), 1000), batcher


def run(config: Config, toolbox: Toolbox, turns: list[str]) -> tuple[list[Trajectory], ScriptedBatcher]:
    runner, batcher = runner_of(config, toolbox, turns)
    return asyncio.run(runner.run(5)), batcher


def text_of(row: Trajectory) -> str:
    return str(scripted_agents.TOKENIZER.decode([*row.prompt_ids, *row.response_ids]))


def test_requests_and_rows_have_them_at_the_same_places(config: Config, toolbox: Any, images: PromptImages) -> None:
    rows, batcher = run(config, toolbox(Draw(pictures=2)), [CALL, scripted_agents.call_text("draw", seed=9), "4."])
    wanted = [picture(90, 60, seed) for seed in (4, 5)]
    height, width = images.processor.size(wanted[0])
    pads = f"<|vision_start|>{IMAGE * (height * width)}<|vision_end|>2"
    for row in rows:
        assert row.status == "ok" and [each.hash for each in row.images] == list(map(images.processor.hash, wanted))
        assert list(row.files.values()) == wanted
        assert f"<|im_start|>tool\n{pads}{pads}<|im_end|>" in text_of(row)
        assert "no room for 2 images: 2 of 3 (model.vision.images_per_prompt)" in text_of(row)  # in the second answer
        ids = [*row.prompt_ids, *row.response_ids]
        for image in row.images:
            assert ids[image.offset : image.end] == [images.token] * image.tokens
            assert not any(row.response_mask[image.offset - len(row.prompt_ids) : image.end - len(row.prompt_ids)])
        mine = [each for each, _, _ in batcher.asked if each.request_id.startswith(f"p-5-{row.sample_index}-")]
        assert [each.images for each in mine] == [(), row.images, row.images]
        assert [list(each.files) for each in mine] == [[], wanted, wanted]
        assert mine[1].prompt_ids == ids[: len(mine[1].prompt_ids)]


def test_an_image_that_cannot_be_shown_is_an_error_that_the_model_reads(config: Config, toolbox: Any) -> None:
    rows, _ = run(config, toolbox(Draw(svg=True)), [CALL, "4."])
    assert all("an image of the answer cannot be used: an SVG or XML file" in text_of(row) for row in rows)
    assert not any(row.images or row.files for row in rows)


def test_a_model_that_sees_nothing(config: Config, toolbox: Any) -> None:
    with pytest.raises(ToolFailed, match="'draw' answers with images, and the model sees none"):
        run(config, replace(toolbox(Draw()), images=None), [CALL, "4."])


def test_an_answer_that_does_not_fit_ends_the_trajectory_before_its_images(config: Config, toolbox: Any) -> None:
    box = toolbox(Draw())
    batcher = ScriptedBatcher([CALL, "4."])
    runner = agent_runner(config, ToolAgent(), box, batcher, KeepingRewards(), len(scripted_agents.ids_of(CALL)) + 20)
    rows = asyncio.run(runner.run(5))
    assert all(row.finish_reason == "length" and not row.images and IMAGE not in text_of(row) for row in rows)


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("fickle", [False, True])
def test_a_run_that_resumes_asks_for_them_again(config: Config, toolbox: Any, idempotent: bool, fickle: bool) -> None:
    """The journal has no images. What was said of another image than the first one's is not used."""
    kept: list[UnfinishedGroup] = []
    tool = Draw(idempotent=idempotent, fickle=fickle)

    async def stop() -> None:
        await asyncio.sleep(0)
        if any(turn == 1 for _, turn in runner.groups.progress[5].begun().responses) and not kept:
            kept.append(runner.groups.progress[5].begun())
            raise RolloutError("the run ends")

    runner, _ = runner_of(config, toolbox(tool), [CALL, "The answer is 4."], stop)
    with pytest.raises(RolloutError, match="the run ends"):
        asyncio.run(runner.run(5))
    made = len(tool.calls)
    again, batcher = runner_of(config, toolbox(tool), [CALL, "The answer is 4."])
    rows = asyncio.run(again.run(5, decode_unfinished(encode_unfinished(5, kept[0], "p"))))
    assert len(tool.calls) == made + 2 * idempotent
    assert all(row.status == "ok" for row in rows)
    assert [INTERRUPTED in text_of(row) for row in rows] == [not idempotent] * 2
    assert [bool(row.images) for row in rows] == [idempotent] * 2
    turns = {request.request_id: request for request, _, _ in batcher.asked if request.request_id.endswith("-1")}
    assert [turns[name].images for name in sorted(turns)] == [row.images for row in rows]


def test_what_is_kept_of_a_response_is_of_its_images() -> None:
    one, other = (ImageRef(name, 1, 1, 1) for name in "ab")
    assert len({prompt_digest([1, 2], each) for each in ((), (one,), (other,), (one, other))}) == 4
