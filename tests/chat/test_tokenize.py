"""Chat template, prompt limits, stop tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import (
    PromptEncoder,
    PromptTooLongError,
    end_of_turn_ids,
    load_tokenizer,
    stop_token_ids,
)
from megarl.config.schema.data import DataConfig
from megarl.data.dataset import Prompt, load_prompts
from tests.support.checkout import EXCERPTS
from tests.support.models.bpe_tokenizer import CHATML, make_tokenizer


def prompt(text: str, index: int = 0) -> Prompt:
    return Prompt(index, [{"role": "user", "content": text}], "", {})


def test_encode_is_the_chat_template_with_its_generation_prompt(tokenizer: Any) -> None:
    ids = PromptEncoder(tokenizer).encode(prompt("What is 2 + 2?"))
    assert tokenizer.decode(ids) == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert all(type(i) is int for i in ids)
    direct = tokenizer.apply_chat_template(
        prompt("What is 2 + 2?").messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == direct


def test_no_second_bos() -> None:
    """The template writes BOS, and the tokenizer would add another one."""
    from tokenizers import processors

    tokenizer = make_tokenizer("<|end|>" + CHATML, bos_token="<|end|>", eos_token="<|im_end|>")
    bos = tokenizer.convert_tokens_to_ids("<|end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos  # it would
    assert PromptEncoder(tokenizer).encode(prompt("x")).count(bos) == 1


def test_missing_and_refusing_templates() -> None:
    with pytest.raises(ValueError, match=r"no chat template: put a chat_template\.jinja"):
        PromptEncoder(make_tokenizer(None))
    refusing = make_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(ValueError, match=r"prompt 7: the chat template refuses .*System role not supported"):
        PromptEncoder(refusing).encode(prompt("x", 7))
    with pytest.raises(ValueError, match="makes no tokens"):
        PromptEncoder(make_tokenizer("{% if false %}x{% endif %}")).encode(prompt("x"))


THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_template_variables_are_those_of_the_set() -> None:
    tokenizer = make_tokenizer(THINKING)
    plain, thinking, quick = (
        tokenizer.decode(PromptEncoder(tokenizer, template_kwargs=kwargs).encode(prompt("x")))
        for kwargs in (None, {"enable_thinking": True}, {"enable_thinking": False})
    )
    assert plain == thinking and quick == plain + "<think></think>"


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    expected = "chat_template_kwargs: enable_thinkng: no variable .* the template reads enable_thinking"
    with pytest.raises(ValueError, match=expected):
        PromptEncoder(make_tokenizer(THINKING), template_kwargs={"enable_thinkng": False})
    with pytest.raises(ValueError, match="the template reads none"):
        PromptEncoder(make_tokenizer(), template_kwargs={"messages": []})
    # {% generation %} is an extension of transformers.
    marked = make_tokenizer(THINKING + "{% generation %}{% endgeneration %}")
    PromptEncoder(marked, template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="no variable"):
        PromptEncoder(marked, template_kwargs={"enable_thinkng": False})


def test_prompt_limit_error_and_skip(tokenizer: Any) -> None:
    prompts = load_prompts(EXCERPTS / "gsm8k.jsonl", DataConfig(path=EXCERPTS / "gsm8k.jsonl"))
    lengths = [len(PromptEncoder(tokenizer).encode(p)) for p in prompts]
    limit = sorted(lengths)[4]
    expected = [i for i, n in enumerate(lengths) if n <= limit]
    assert 0 < len(expected) < len(prompts)
    skipping = PromptEncoder(tokenizer, limit, "skip")
    assert list(skipping.valid_indices(prompts)) == expected
    assert skipping.skipped == len(prompts) - len(expected)
    for index in expected:
        assert len(skipping.encode(prompts[index])) <= limit
    first_bad = next(i for i in range(len(prompts)) if i not in expected)
    message = f":{first_bad + 1} has {lengths[first_bad]} tokens, more than data.max_prompt_tokens = {limit}"
    with pytest.raises(PromptTooLongError, match=message):
        PromptEncoder(tokenizer, limit).valid_indices(prompts)
    with pytest.raises(PromptTooLongError):
        skipping.encode(prompts[first_bad])
    with pytest.raises(ValueError, match="all 8 prompts are longer"):
        PromptEncoder(tokenizer, 3, "skip").valid_indices(prompts)
    assert list(PromptEncoder(tokenizer).valid_indices(prompts)) == list(range(8))


def test_short_prompts_are_not_tokenized_to_be_measured(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, 10_000)
    encoder.encode = None  # type: ignore[assignment, method-assign]
    assert list(encoder.valid_indices([prompt("short"), prompt("also")])) == [0, 1]


def test_the_length_bound_is_one(tokenizer: Any) -> None:
    """The bytes of the text and the template's share are never fewer than the tokens, whatever the text is."""
    texts = ["é" * 40, "日本語" * 20, "\U0001f600" * 30, "<|im_start|>" * 9, " \n\t" * 30, "a\u0301" * 25]
    for text in texts:
        ids = PromptEncoder(tokenizer).encode(prompt("x" + text))
        limit = len(ids) - 1
        assert list(PromptEncoder(tokenizer, limit, "skip").valid_indices([prompt("x"), prompt("x" + text)])) == [0]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tmp_path


def save_generation_config(model_dir: Path, eos: Any) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def test_stop_ids_are_the_union_of_what_ends_a_response(tokenizer: Any, model_dir: Path) -> None:
    """The generation config of Qwen's base models, for example, lacks the chat template's end of turn."""
    end, im_end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|im_end|>", "<pad>"))
    assert stop_token_ids(model_dir, tokenizer) == sorted([end, im_end])
    save_generation_config(model_dir, pad)
    assert stop_token_ids(model_dir, tokenizer) == sorted([end, im_end, pad])
    save_generation_config(model_dir, [end, pad])
    assert stop_token_ids(model_dir, tokenizer) == sorted([end, im_end, pad])
    assert stop_token_ids(model_dir, tokenizer, [pad]) == [pad]  # configured: nothing else


def test_no_stop_token_is_an_error(model_dir: Path) -> None:
    bare = make_tokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    with pytest.raises(ValueError, match=r"no stop token: .* set sampling\.stop_token_ids"):
        stop_token_ids(model_dir, bare)
    with pytest.raises(ValueError, match="no stop token"):
        stop_token_ids(model_dir, bare, [])
    assert end_of_turn_ids(bare) == set()  # a newline is no special token
    save_generation_config(model_dir, 10**6)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        stop_token_ids(model_dir, bare)
    (model_dir / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        stop_token_ids(model_dir, bare)


def test_a_template_that_takes_no_assistant_turn_is_no_error(model_dir: Path) -> None:
    template = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}x"
    assert end_of_turn_ids(make_tokenizer(template)) == set()


def test_load_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    again = load_tokenizer(tmp_path / "model")
    assert PromptEncoder(again).encode(prompt("x")) == PromptEncoder(tokenizer).encode(prompt("x"))
    assert stop_token_ids(tmp_path / "model", again) == stop_token_ids(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path / "nothing")


def test_a_prompt_shows_the_tools_of_its_row() -> None:
    add, sub = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))
    shows = "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}" + CHATML
    own = Prompt(0, [{"role": "user", "content": "x"}], "", {}, tools=(add,))
    tokenizer = make_tokenizer(shows)

    def text(encoder: PromptEncoder) -> str:
        return str(tokenizer.decode(encoder.encode(own)))

    assert text(PromptEncoder(tokenizer)).startswith("[add]<|im_start|>")
    assert text(PromptEncoder(tokenizer, tools=[add, sub])).startswith("[add]<|im_start|>")
    with pytest.raises(ValueError, match=r"prompt 0 has the tool 'add', which is none of the run's: \['sub'\]"):
        PromptEncoder(tokenizer, tools=[sub]).encode(own)
    with pytest.raises(ValueError, match="does not show tools"):
        PromptEncoder(make_tokenizer(CHATML)).encode(own)


@pytest.mark.parametrize(
    "broken", ["{% include 'x' %}", "{{ messages + 1 }}", "{{ range(10 ** 9) | list }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_cannot_be_rendered_is_named_with_its_prompt(broken: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = broken
    with pytest.raises(ValueError, match="prompt 3: the chat template refuses its messages"):
        PromptEncoder(tokenizer).encode(prompt("x", 3))
