"""The quickstart's task: two-digit additions, solved in columns; three of four demonstrations forget the carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerFast

from examples.quickstart.demonstrations import Demonstration, TaskData
from examples.quickstart.problems import Addition, Splits, check_disjoint, make_splits, solutions
from examples.quickstart.tokenizer import CHAT_TEMPLATE, prompt_text


class AdditionsTask:
    """Implements `StarterTask`; see the package docstring."""

    name = "additions"
    recipe = 1
    chat_template = CHAT_TEMPLATE
    vocabulary = 320
    steps = 450

    def data(self, seed: int) -> TaskData:
        """See `StarterTask.data`. Each warm-start problem has four rows, one per solution."""
        splits = make_splits(seed)
        return TaskData(
            warm_start=[_row(item) | {"solution": text} for item in splits.warm_start for text in solutions(item)],
            train=[_row(item) for item in splits.train],
            heldout=[_row(item) for item in splits.heldout],
        )

    def check(self, problems: Mapping[str, Sequence[str]]) -> None:
        """See `StarterTask.check`. A pair of numbers, in either order, is in one set only."""
        check_disjoint(Splits(**{name: [_parse(text) for text in texts] for name, texts in problems.items()}))

    def corpus(self, data: TaskData) -> Iterable[str]:
        """Yield the warm-start set's texts, with the chat template's roles."""
        for item in map(_parse, dict.fromkeys(row["problem"] for row in data.warm_start)):
            yield f"user\n{item.problem}"
            yield from (f"assistant\n{text}" for text in solutions(item))
            yield from ("assistant\n", solutions(item)[0])

    def demonstrations(self, tokenizer: PreTrainedTokenizerFast, data: TaskData) -> list[Demonstration]:
        """See `StarterTask.demonstrations`."""
        return [Demonstration(prompt_text(tokenizer, row["problem"]), (row["solution"],)) for row in data.warm_start]


def _row(item: Addition) -> dict[str, str]:
    return {"problem": item.problem, "answer": item.answer}


def _parse(problem: str) -> Addition:
    first, second = problem.removeprefix("What is ").removesuffix("?").split(" + ")
    return Addition(int(first), int(second))
