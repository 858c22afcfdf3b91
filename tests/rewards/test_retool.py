"""The reward of the retool recipe, from the file that the recipe names."""

import pytest

from examples.rl.agents.retool import reward
from megarl.rewards.types import RewardInput, Turn

CALL = Turn("assistant", "let me see", calls=({"name": "code_interpreter", "arguments": {"code": "print(4)"}},))
ANSWER = Turn("tool", "\\boxed{4}")


def scored(response: str, rounds: int = 0) -> float:
    turns = (CALL, ANSWER) * rounds + (Turn("assistant", response),)
    return reward(RewardInput("2+2?", response, answer="4", turns=turns)).score


@pytest.mark.parametrize("rounds", [0, 1, 9])
def test_a_right_answer_in_a_box_is_worth_1(rounds: int) -> None:
    assert scored("so \\boxed{4}", rounds) == 1.0


@pytest.mark.parametrize(("rounds", "score"), [(0, -1.0), (1, -0.9), (3, -0.7), (4, -0.6), (12, -0.6)])
@pytest.mark.parametrize("response", ["\\boxed{5}", "it is 4", ""])
def test_a_wrong_answer_costs_less_after_calls(response: str, rounds: int, score: float) -> None:
    """An answer without a box is wrong, and so is one that only the tool has given."""
    assert scored(response, rounds) == pytest.approx(score)


def test_its_components_are_reported() -> None:
    turns = (CALL, ANSWER, Turn("assistant", "\\boxed{4}"))
    found = reward(RewardInput("2+2?", "\\boxed{4}", answer="4", turns=turns))
    assert found.components == {"correct": 1.0, "parsed": 1.0, "boxed": 1.0, "rounds": 1.0} and found.answer == "4"
