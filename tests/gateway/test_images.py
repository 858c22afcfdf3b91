"""Chats with images: their tokens, their files, their sessions, and what is refused before anything is decoded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megarl.environments.session_rows import read_turns, session_rows
from megarl.models.hf import image_patches
from megarl.models.hf.image_patches import ImageProcessor
from megarl.rollout.engine.messages import GenerateRequest
from tests.security.test_images import png
from tests.support.gateway.gateway_requests import get, post
from tests.support.gateway.gateway_stand_in import StandInGateway
from tests.support.models.tiny_vision import IMAGE, make_tiny_vision, picture, vision_tokenizer
from tests.support.rollout.picture_agents import data_url

ONE, TWO, THREE = picture(90, 60, 1), picture(130, 170, 2), picture(90, 60, 3)
TOKENIZER = vision_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture
def gateway(model: Path) -> Iterator[StandInGateway]:
    made = StandInGateway(model, lambda request: [70, 71, TOKENIZER.eos_token_id], sees=True)
    yield made
    made.close()


def user(*parts: str | bytes) -> dict[str, Any]:
    """A message of texts and images; a text that is a URL is the URL of an image."""
    content: list[dict[str, Any]] = []
    for part in parts:
        url = data_url(part) if isinstance(part, bytes) else part
        shown = isinstance(part, bytes) or "://" in part or part.startswith("data:")
        content.append({"type": "image_url", "image_url": {"url": url}} if shown else {"type": "text", "text": part})
    return {"role": "user", "content": content}


def say(gateway: StandInGateway, *messages: dict[str, Any], session: str = "s") -> httpx.Response:
    return post(gateway, "/v1/chat/completions", {"messages": list(messages)}, **{"X-Session-ID": session})


def asked(gateway: StandInGateway) -> GenerateRequest:
    found: list[GenerateRequest] = gateway.call(lambda parts: parts.replicas[0].asked)
    return found[-1]


def said(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["message"])


def test_a_dialogue_with_images_goes_on_from_its_exact_tokens(gateway: StandInGateway, model: Path) -> None:
    processor = ImageProcessor(model, 64 * 28 * 28)
    first = user("See ", ONE, ".")
    answer = said(say(gateway, first))
    begun = asked(gateway)
    [image] = begun.images
    assert (image.hash, image.height, image.width) == (processor.hash(ONE), *processor.size(ONE))
    pads = f"<|vision_start|>{IMAGE * image.tokens}<|vision_end|>"
    assert TOKENIZER.decode(begun.prompt_ids) == f"<|im_start|>user\nSee {pads}.<|im_end|>\n<|im_start|>assistant\n"
    assert begun.files == (ONE,)
    said(say(gateway, first, answer, user(TWO, f"And {IMAGE}?")))  # the text of a token is no image
    second = asked(gateway)
    known = [*begun.prompt_ids, 70, 71, TOKENIZER.eos_token_id]
    assert second.prompt_ids[: len(known)] == known
    assert second.images[0] == image and second.files == (ONE, TWO)
    other = second.images[1]
    assert second.prompt_ids[other.offset : other.end] == [TOKENIZER.convert_tokens_to_ids(IMAGE)] * other.tokens
    assert second.prompt_ids.count(TOKENIZER.convert_tokens_to_ids(IMAGE)) == image.tokens + other.tokens
    [row] = session_rows(read_turns(get(gateway, "/v1/sessions/s")))
    assert [(each.hash, each.offset, each.file) for each in row.images] == [
        (image.hash, image.offset, ONE), (other.hash, other.offset, TWO)
    ]  # fmt: skip
    assert [*row.prompt_ids, *row.response_ids][: len(second.prompt_ids)] == second.prompt_ids
    assert gateway.call(lambda parts: parts.sessions.tokens) > (len(ONE) + len(TWO)) // 12  # files count as memory


def test_another_image_begins_another_dialogue(gateway: StandInGateway) -> None:
    answer = said(say(gateway, user("See ", ONE)))
    said(say(gateway, user("See ", THREE), answer, user("And?")))
    assert [each.file for turn in read_turns(get(gateway, "/v1/sessions/s")) for each in turn.images] == [ONE, THREE]
    assert [turn.parent for turn in read_turns(get(gateway, "/v1/sessions/s"))] == [None, None]


def test_a_request_of_tokens_goes_on_with_the_images_of_its_session(gateway: StandInGateway) -> None:
    said(say(gateway, user("See ", ONE)))
    begun = asked(gateway)
    body = {"token_ids": [*begun.prompt_ids, 70, 71, TOKENIZER.eos_token_id, 65, 66], "sampling_params": {}}
    assert post(gateway, "/inference/v1/generate", body, **{"X-Session-ID": "s"}).status_code == 200
    assert (asked(gateway).images, asked(gateway).files) == (begun.images, begun.files)


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (user(png(50_000, 50_000, b"")), "at most 50,000,000 are decoded"),
        (user(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "an SVG or XML file"),
        (user(ONE, TWO, THREE), "a chat may have 2 images (model.vision.images_per_prompt)"),
        (user("data:image/png;base64,%%%"), "image 1 is refused: "),
        (user("data:text/plain,hello"), "a data URL in base64"),
        (user("file:///etc/passwd"), "only data URLs in base64 are read, and http or https"),
        (user("http://169.254.169.254/latest/meta-data"), "not fetched from '169.254.169.254'"),
        (user("https://example.com/a.png"), "allow its host (gateway.image_hosts)"),
        (user("https://user@example.com/a.png"), "without a user"),
        ({**user(ONE), "role": "assistant"}, "in messages of user and tool only"),
        ({**user(ONE), "role": "system"}, "in messages of user and tool only"),
    ],
)
def test_what_is_refused(gateway: StandInGateway, message: dict[str, Any], reported: str) -> None:
    answer = say(gateway, message)
    assert answer.status_code == 400 and reported in answer.json()["error"]["message"], answer.text
    assert gateway.call(lambda parts: parts.replicas[0].asked) == []


def test_a_large_file_is_refused_before_it_is_decoded(gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.gateway import image_urls

    monkeypatch.setattr(image_urls, "MOST_BYTES", 300)
    monkeypatch.setattr(image_patches, "MOST_BYTES", 300)
    assert "more than 300 bytes" in say(gateway, user(ONE)).json()["error"]["message"]


def test_a_model_that_reads_text_only(model: Path) -> None:
    gateway = StandInGateway(model, lambda request: [70])
    try:
        answer = say(gateway, user("See ", ONE))
    finally:
        gateway.close()
    assert answer.status_code == 400 and "the model sees no images" in answer.json()["error"]["message"]
