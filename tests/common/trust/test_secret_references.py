"""References are found at any depth, replaced by values, and nothing else is changed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.trust.secret_references import literal_secrets, references, resolved

leaves = st.none() | st.booleans() | st.integers() | st.text()
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner))


@given(path=st.lists(st.integers(0, 2) | st.sampled_from("abc"), max_size=5))
def test_a_reference_at_any_depth(path: list[int | str]) -> None:
    tree: Any = {"env": "MEGARL_TEST_SECRET"}
    expected: Any = "hidden"
    for step in reversed(path):
        tree, expected = ([tree], [expected]) if isinstance(step, int) else ({step: tree}, {step: expected})
    place = ".".join(["k", "x", *("0" if isinstance(step, int) else step for step in path)])
    assert list(references({"x": tree}, "k")) == [(place, "MEGARL_TEST_SECRET")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_TEST_SECRET", "hidden")
        assert resolved({"x": tree}, "k") == {"x": expected}
        patch.delenv("MEGARL_TEST_SECRET")
        with pytest.raises(ValueError, match=rf"^{place}: the environment variable MEGARL_TEST_SECRET is not set"):
            resolved({"x": tree}, "k")


@pytest.mark.parametrize("value", [{"env": "A", "x": 1}, {"env": 3}, {"env": "not a name"}, {"ENV": "A"}, "env"])
def test_what_is_no_reference(value: object) -> None:
    assert resolved({"x": value}, "k") == {"x": value}


def test_names_of_secrets() -> None:
    values = {"api_key": "x", "a": {"hf_token": "y", "stop_token": "</s>"}, "password": {"env": "P"}, "tokens": "z"}
    assert list(literal_secrets(values, "k")) == ["k.api_key", "k.a.hf_token"]


def test_secrets_in_lists_and_with_hyphens() -> None:
    values = {
        "judges": [{"url": "u", "api_key": "x"}, [{"hf_token": "y"}], {"api_key": {"env": "A"}}],
        "api_keys": "no name of a secret",
        "password": ["a", {"env": "P"}, "", 3],
        "numbered": {1: [{"AWS_SESSION_TOKEN": "v"}]},
        "headers": {"X-API-Key": "z", "bearer-token": "w", "max-tokens": "5", "stop-token": "</s>"},
    }
    found = ["k.judges.0.api_key", "k.judges.1.0.hf_token", "k.password.0", "k.numbered.1.0.AWS_SESSION_TOKEN"]
    assert list(literal_secrets(values, "k")) == [*found, "k.headers.X-API-Key", "k.headers.bearer-token"]


@pytest.mark.parametrize("name", ["max_tokens", "token", "eos_token", "token_type", "tokenizer", "pad-token", "monkey"])
def test_names_of_tokens_of_a_model_are_no_secrets(name: str) -> None:
    assert not list(literal_secrets({name: "x"}, "k"))
