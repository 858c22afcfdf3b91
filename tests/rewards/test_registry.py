"""User functions are found and adapted."""

import pytest

from megarl.rewards.registry import as_result, resolve
from megarl.rewards.types import RewardInput, RewardResult, Turn

SAMPLE = RewardInput(prompt="?", response="A", token_ids=[1, 2], finish_reason="length", answer="A", row={"k": 1})
HERE = "tests.support.rewards.reward_functions"


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("plain", {}, 1.0),  # (response, answer)
        ("other_names", {}, 1.0),  # two parameters of any name
        ("some_fields", {}, 1.0),  # fields by name, optional ones too
        ("some_fields", {"weight": 0.5}, 0.5),  # a bound keyword
        ("response_only", {}, 1.0),
        ("everything", {}, 8.0),  # **fields
        ("by_response", {}, 1.0),  # the whole sample
        ("Scaled", {"scale": 3.0}, 3.0),  # a class
    ],
)
def test_adapted_signatures(name: str, kwargs: dict, expected: float) -> None:
    assert resolve(f"{HERE}:{name}", kwargs)(SAMPLE).score == expected


def test_field_names_are_not_taken_by_position() -> None:
    """`(answer, row)` must not be read as `(response, answer)`."""
    result = resolve(f"{HERE}:some_fields")(RewardInput("", "B", finish_reason="length", answer="A", row={"k": 1}))
    assert result == RewardResult(1.0, {"k": 1.0})


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        (f"{HERE}:three", {}, "RewardInput, or \\(response, answer\\)"),
        (f"{HERE}:not_callable", {}, "is a int, not a function"),
        (f"{HERE}:Scaled", {"size": 1}, "cannot be made with"),
        (f"{HERE}:coroutine", {}, "async"),
        (HERE, {}, "package.module:function"),
        ("mine/rewards.py:score", {}, r"is a file: write the path that imports it, mine\.rewards:score"),
        (f"{HERE}:as_in_trl", {}, "signature of TRL, .* once for each sample"),
        (f"{HERE}:as_in_verl", {}, "signature of verl: solution_str is `response`"),
        ("megarl.rewards.types:RewardInput.nothing", {}, "has no"),
    ],
)
def test_clear_errors(path: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(path, kwargs)


def test_returned_values() -> None:
    import numpy as np

    assert as_result(True) == RewardResult(1.0)
    assert as_result(np.float32(0.5)) == RewardResult(0.5)
    assert as_result(RewardResult(1, answer=7)).answer == "7"  # type: ignore[arg-type]
    assert as_result(RewardResult(1, {"a": np.int64(2)})).components == {"a": 2.0}  # type: ignore[dict-item]
    assert as_result(RewardResult(1, turn_rewards=[np.float32(2), 3])).turn_rewards == (2.0, 3.0)  # type: ignore[arg-type]
    bad_turns = [RewardResult(1.0, turn_rewards=turns) for turns in ((float("nan"),), ("x",), None, 1.0)]  # type: ignore[arg-type]
    for bad in (None, "one", "1.0", [1.0], RewardResult(None), float("inf"), *bad_turns):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="number"):
            as_result(bad)


def test_rewards_of_turns_are_one_for_each_turn_of_the_model() -> None:
    function = resolve(f"{HERE}:half_by_turn")
    turns = (Turn("assistant", "a"), Turn("tool", "b"), Turn("assistant", "c"))
    for given, most in ((turns, 2), ((), 1)):
        for count in range(4):
            sample = RewardInput("", "x", row={"count": count}, turns=given)
            if count in (0, most):
                assert function(sample).turn_rewards == (0.5,) * count
                continue
            with pytest.raises(ValueError, match=f"{count} turn_rewards, and the model had {most} turns"):
                function(sample)
