"""The state that is kept of a group in progress, over any number of attempts."""

from dataclasses import replace

from megarl.chat.formats import Prompt
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import GroupProgress, PartialResponse, UnfinishedGroup, prompt_digest
from megarl.rollout.tasks.prompts import PromptTask

PROMPT = [5, 6]
TASK = PromptTask(Prompt(0, [], "", {}), PROMPT, SamplingSpec(8, 1.0, (2,)))


def request(name: str, prompt: list[int] = PROMPT) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingSpec(8, 1.0, (2,)))


def part(*ids: int) -> ResponsePart:
    return ResponsePart(list(ids), [-0.5] * len(ids), (VersionSpan(3, 0, len(ids)),))


def test_responses_with_tokens_are_begun() -> None:
    progress = GroupProgress(TASK)
    for index, name in enumerate("abc"):
        progress.begin(request(name), (index, 0))
    progress.tokens |= {"a": part(7), "b": ResponsePart()}
    assert progress.begun().responses == {(0, 0): PartialResponse(prompt_digest(PROMPT), part(7))}


def test_the_next_attempt_continues_the_same_requests_under_other_names() -> None:
    begun = {
        (0, 0): PartialResponse(prompt_digest(PROMPT), replace(part(7, 2), finish_reason="stop")),
        (0, 1): PartialResponse(prompt_digest([*PROMPT, 7, 2]), part(9)),
        (1, 0): PartialResponse(prompt_digest([1]), part(4)),
    }
    progress = GroupProgress(TASK, UnfinishedGroup(begun))
    assert progress.begun() == UnfinishedGroup(begun) and not progress.tokens
    progress.begin(request("x"), (0, 0))
    progress.begin(request("y"), (1, 0))  # what is kept is of another prompt
    assert progress.tokens == {"x": begun[0, 0].tokens}
    assert progress.begun().responses == {place: begun[place] for place in ((0, 0), (0, 1))}
    again = request("z", [*PROMPT, 7, 2])
    other = GroupProgress(TASK, UnfinishedGroup(begun))
    other.begin(replace(again, routes_from=3), (0, 1))  # what is kept has experts of other tokens
    assert not other.tokens
    progress.begin(again, (0, 1))
    assert progress.tokens["z"] == part(9)


def test_a_response_that_an_engine_has_dropped_can_go_on() -> None:
    progress = GroupProgress(TASK)
    progress.begin(request("a"), (0, 0))
    progress.tokens["a"] = replace(part(7), finish_reason="abort")
    assert progress.begun().responses[0, 0].tokens == part(7)


def test_the_size_grows_with_tokens_and_ends() -> None:
    sizes = []
    for tokens in (part(), part(7), part(7, 8), replace(part(7, 8), finish_reason="stop")):
        sizes.append(UnfinishedGroup({(0, 0): PartialResponse("", tokens)}).size)
    assert sizes == [0, 1, 2, 3]
