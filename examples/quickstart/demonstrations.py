"""Demonstrations for the supervised training, and the interface of a task that has them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerFast

ProblemRow = Mapping[str, str]


@dataclass(frozen=True)
class Demonstration:
    """A conversation: the text of the prompt, and the turns of the model, each of which EOS ends.

    `between`: the texts that follow each turn but the last one. The model reads them and does not learn them.
    `picture`: the PNG whose tokens the prompt has; all demonstrations of a task have one, or none has.
    """

    prompt: str
    turns: tuple[str, ...]
    between: tuple[str, ...] = ()
    picture: bytes = b""


@dataclass(frozen=True)
class TaskData:
    """The rows of the three data files; those of the warm start have a `solution` besides `problem` and `answer`.

    `pictures`: PNG files by the path that rows have as `images`. The model sees if there are any.
    """

    warm_start: Sequence[ProblemRow]
    train: Sequence[ProblemRow]
    heldout: Sequence[ProblemRow]
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    def rows(self) -> dict[str, Sequence[ProblemRow]]:
        """Return the rows by the name of their file."""
        return {"warm_start": self.warm_start, "train": self.train, "heldout": self.heldout}


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
    """Return the problems of the three data files in `directory`, each once per file: its picture, or its text."""
    found = {}
    for name in ("warm_start", "train", "heldout"):
        lines = (directory / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found[name] = list(dict.fromkeys(row.get("images", row["problem"]) for row in rows))
    return found


def check_apart(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise AssertionError if two of the sets share a problem."""
    for first, second in itertools.combinations(sorted(problems), 2):
        if shared := set(problems[first]) & set(problems[second]):
            raise AssertionError(f"{first} and {second} share {len(shared)} problems, e.g. {min(shared)}")
