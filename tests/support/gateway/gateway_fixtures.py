"""Fixtures of the gateway's tests: a tokenizer whose chat template shows tools and writes calls as Qwen's does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway.gateway_stand_in import Answer, StandInGateway
from tests.support.models.tiny import make_tiny_tokenizer

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>\n' + ({'name': call['function']['name'], "
    "'arguments': call['function']['arguments']} | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of single characters, and no weights."""
    directory = tmp_path_factory.mktemp("chat-model")
    tokenizer = make_tiny_tokenizer(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def gateways(chat_model: Path) -> Iterator[object]:
    """A function that starts a stand-in gateway; all are closed at the end."""
    started: list[StandInGateway] = []

    def start(answer: Answer, **settings: object) -> StandInGateway:
        started.append(StandInGateway(chat_model, answer, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()
