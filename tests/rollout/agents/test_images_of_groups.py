"""A prompt's images reach every request and every row of its group; their files are read once."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.chat.formats import Prompt
from megarl.common.errors import RolloutError
from megarl.config.schema import Config
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine.messages import SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart, continue_request
from megarl.rollout.tasks.prompts import PromptTask
from tests.support.rollout.fake_rollout import FakeBatcher, FakeRewards, FakeSource
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

IMAGES = (ImageRef("a", 1, 1, 2), ImageRef("b", 4, 1, 1))


@pytest.fixture
def config() -> Config:
    return config_of("model", sampling={"max_tokens": 16})


class Seen(FakeSource):
    """The prompts have two images, one of them a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(b"the other")
        self.path = path

    def draw(self, group_id: int) -> PromptTask:
        prompt = Prompt(group_id, [{"role": "user", "content": "x"}], "1", {}, images=(b"one", self.path))
        return PromptTask(prompt, [5, 9, 9, 5, 9, 5], SamplingSpec(16, 1.0, (2,)), images=IMAGES)


def run(config: Config, source: Seen, loop: AgentLoop | None = None) -> tuple[list[Trajectory], FakeBatcher]:
    batcher = FakeBatcher()
    runner = GroupRunner(config, loop or SingleTurn(), source, batcher.generate, FakeRewards())
    return asyncio.run(runner.run(2)), batcher


def test_every_request_and_row_of_a_group_has_them_and_files_are_read_once(config: Config, tmp_path: Path) -> None:
    rows, batcher = run(config, Seen(tmp_path / "b.png"))
    requests = [request for request, _, _ in batcher.asked]
    assert len(requests) == len(rows) == config.batch.samples_per_group
    assert all(row.images == IMAGES for row in rows)
    assert all(each.images == IMAGES and each.files == (b"one", b"the other") for each in requests)
    assert len({id(each.files[1]) for each in requests}) == 1  # so one message has it once
    so_far = ResponsePart([7, 8], [-1.0, -1.0])
    continued = continue_request(requests[0], so_far)
    assert (continued.images, continued.files) == (requests[0].images, requests[0].files)


def test_a_file_that_has_gone_fails_its_group(config: Config, tmp_path: Path) -> None:
    source = Seen(tmp_path / "b.png")
    source.path.unlink()
    with pytest.raises(RolloutError, match=r"an image of prompt 2 cannot be read: .*b.png"):
        run(config, source)


class OtherTokens:
    """Asks with tokens that are not the prompt's."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        await ctx.generate([4, *ctx.prompt.ids])
        raise AssertionError


def test_a_loop_that_moves_the_images_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="must begin with the token ids of their prompt"):
        run(config, Seen(tmp_path / "b.png"), OtherTokens())


def test_another_image_is_another_problem(tmp_path: Path) -> None:
    """So a resumed run does not use what was said of a picture that has been replaced."""
    task = Seen(tmp_path / "b.png").draw(1)
    changed = replace(task, images=(replace(IMAGES[0], hash="c"), IMAGES[1]))
    assert task.digest != changed.digest
    assert task.digest == replace(task, prompt=replace(task.prompt, where="x")).digest
    assert task.without_files().prompt.images == () and task.without_files().images == IMAGES
