"""The text of token ids, with and without the library's own batches, and alongside a thread that encodes."""

import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megarl.chat.tokenize import TokenDecoder, library_tokenizer
from tests.support.models.bpe_tokenizer import make_tokenizer

SEQUENCES = st.lists(st.lists(st.integers(0, 399), max_size=40), max_size=5)


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with a decoding of its own."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


class Reversing(PreTrainedTokenizerFast):
    """A tokenizer that encodes in a way of its own."""

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._encode_plus(*args, **kwargs)
        found["input_ids"] = found["input_ids"][::-1]
        return found


def test_a_tokenizer_with_ways_of_its_own_is_asked_itself() -> None:
    raw = make_tokenizer().backend_tokenizer
    assert library_tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw)) is not None
    for own in (Shouting, Reversing):
        assert library_tokenizer(own(tokenizer_object=raw)) is None
    assert library_tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, split_special_tokens=True)) is None


@settings(deadline=None, max_examples=50)
@given(SEQUENCES)
def test_texts_are_those_of_the_tokenizer_without_special_tokens(sequences: list[list[int]]) -> None:
    tokenizer = make_tokenizer()
    raw = tokenizer.backend_tokenizer
    cleaning = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=True)
    for each in (tokenizer, cleaning, Shouting(tokenizer_object=raw)):
        expected = [each.decode(ids, skip_special_tokens=True) for ids in sequences]
        assert TokenDecoder(each).texts(sequences) == expected


def test_a_thread_decodes_while_the_tokenizer_encodes() -> None:
    tokenizer = make_tokenizer()
    decoder, sequences, ended = TokenDecoder(tokenizer), [list(range(400)) * 5] * 16, threading.Event()
    expected, found = decoder.texts(sequences), []

    def decode() -> None:
        while not ended.is_set():
            found.append(decoder.texts(sequences))

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        for length in range(200):  # each changes a setting of the tokenizer
            tokenizer("some text", truncation=True, max_length=1 + length % 3)
    finally:
        ended.set()
        thread.join(10)
    assert found and all(texts == expected for texts in found)


def test_marks_of_a_reasoning_stay_in_the_text_though_they_are_special_tokens() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|channel|>", "<|other|>"]})
    texts = ["[THINK]one[/THINK]two<|other|>", "[THINK][THINK]", "<|channel|>final three<|other|>", "four<|other|>", ""]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected = [text.replace("<|other|>", "") for text in texts]
    assert TokenDecoder(tokenizer).texts(ids) == expected
    assert TokenDecoder(tokenizer).texts(ids[3:]) == expected[3:]  # none of them is marked
