"""The reward of geometry3k."""

import pytest

from examples.rl.vision.geo3k import reward as geo3k
from megarl import RewardInput


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>3 + 4</think> So \boxed{7}.", 1.0),
        (r"<think>3 + 4</think> So \boxed{8}.", 0.1),
        (r"So \boxed{7}.", 0.9),
        (r"First: <think>3 + 4</think> So \boxed{7}.", 0.9),
        (r"<think>It is 7.</think>", 0.0),
        ("7", 0.0),
    ],
)
def test_nine_tenths_are_for_the_answer_and_one_for_the_form(response: str, score: float) -> None:
    assert geo3k(RewardInput(prompt="x", response=response, answer="7")).score == pytest.approx(score, abs=1e-12)
