"""Demonstrations for the supervised training, and the interface of a task that has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerFast

ProblemRow = Mapping[str, str]


@dataclass(frozen=True)
class Demonstration:
    """A conversation: the text of the prompt, and the turns of the model, each of which EOS ends.

    `between`: the texts that follow each turn but the last one. The model reads them and does not learn them.
    """

    prompt: str
    turns: tuple[str, ...]
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskData:
    """The rows of the three data files; those of the warm start have a `solution` besides `problem` and `answer`."""

    warm_start: Sequence[ProblemRow]
    train: Sequence[ProblemRow]
    heldout: Sequence[ProblemRow]


class StarterTask(Protocol):
    """A task whose data and warm-started checkpoint can be made from a seed.

    Attributes:
        name: the name that the command line takes.
        recipe: a number that is increased if the same seed makes other assets.
        chat_template: of the tokenizer.
        vocabulary: the most tokens that the tokenizer has.
        steps: of the supervised training.
    """

    name: str
    recipe: int
    chat_template: str
    vocabulary: int
    steps: int

    def data(self, seed: int) -> TaskData:
        """Return the rows; the problems of the three sets are disjoint."""
        ...

    def check(self, problems: Mapping[str, Sequence[str]]) -> None:
        """Raise AssertionError unless the sets, by the name of their file, have different problems."""
        ...

    def corpus(self, data: TaskData) -> Iterable[str]:
        """Yield the texts on which the tokenizer is trained."""
        ...

    def demonstrations(self, tokenizer: PreTrainedTokenizerFast, data: TaskData) -> list[Demonstration]:
        """Return what the model learns in the warm start."""
        ...


def read_problems(directory: Path) -> dict[str, list[str]]:
    """Return the problems of the three data files in `directory`, each once per file."""
    found = {}
    for name in ("warm_start", "train", "heldout"):
        lines = (directory / f"{name}.jsonl").read_text().splitlines()
        found[name] = list(dict.fromkeys(json.loads(line)["problem"] for line in lines))
    return found
