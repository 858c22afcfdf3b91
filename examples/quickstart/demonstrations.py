"""Demonstrations for supervised training, and the interface of a task that has them."""

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
    """A conversation: the prompt's text and the model's turns, each ended by EOS.

    `between`: the texts after each turn but the last. The model reads them but does not learn them. `picture`: the PNG
    whose tokens are in the prompt; either all demonstrations of a task have one, or none.
    """

    prompt: str
    turns: tuple[str, ...]
    between: tuple[str, ...] = ()
    picture: bytes = b""


@dataclass(frozen=True)
class TaskData:
    """The rows of the three data files; warm-start rows have a `solution` besides `problem` and `answer`.

    `pictures`: PNG files by the path in the rows' `images`. If there are any, the model has vision.
    """

    warm_start: Sequence[ProblemRow]
    train: Sequence[ProblemRow]
    heldout: Sequence[ProblemRow]
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    def rows(self) -> dict[str, Sequence[ProblemRow]]:
        """Return the rows by file name."""
        return {"warm_start": self.warm_start, "train": self.train, "heldout": self.heldout}


class StarterTask(Protocol):
    """A task whose data and warm-started checkpoint can be made from a seed.

    Attributes:
        name: the name on the command line.
        recipe: a number, increased when the same seed makes different assets.
        chat_template: the tokenizer's.
        vocabulary: the tokenizer's maximum size.
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
        """Raise AssertionError if the sets, keyed by file name, share problems."""
        ...

    def corpus(self, data: TaskData) -> Iterable[str]:
        """Yield the tokenizer's training texts."""
        ...

    def demonstrations(self, tokenizer: PreTrainedTokenizerFast, data: TaskData) -> list[Demonstration]:
        """Return what the model learns in the warm start."""
        ...


def read_problems(directory: Path) -> dict[str, list[str]]:
    """Return the problems in the three data files in `directory`, each once per file: its picture or its text."""
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
