"""The check of a run's data files before anything starts: every bad row, not only the first one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.common.errors import ConfigError
from megarl.config.datasets import all_sets
from megarl.config.schema import Config
from megarl.data.dataset import load_prompts, row_problems
from megarl.data.formats import Prompt

MOST_ROWS = 50_000  # of each file, about a second; the run itself checks all of them
MOST_TOLD = 10  # different problems of each file
MOST_NAMED = 5  # rows with the same problem


def check_data_files(config: Config) -> None:
    """Raise ConfigError with the bad rows of all training and evaluation sets."""
    if problems := list(data_file_problems(config)):
        raise ConfigError(problems)


def data_file_problems(config: Config) -> Iterator[str]:
    """Yield the bad rows of all training and evaluation sets, as `key: file:line: what is wrong`.

    Rows of a set with the same problem are one line.
    """
    for each in all_sets(config):
        try:
            found = list(row_problems(each.path, each.data, MOST_ROWS).items())
        except (ValueError, OSError) as error:
            yield f"{each.key}: {error}"
            continue
        yield from (f"{each.key}: {rows[0]}: {text}{_others(each.path, rows)}" for text, rows in found[:MOST_TOLD])
        if (more := sum(len(rows) for _, rows in found[MOST_TOLD:])) > 0:
            yield f"{each.key}: {more} more rows of {each.path} are wrong"


def _others(path: Path, rows: list[str]) -> str:
    """Return how many rows have the problem of the first one, and which; empty if none has."""
    if len(rows) == 1:
        return ""
    named = [row.removeprefix(str(path)).lstrip(":, ") for row in rows[1 : 1 + MOST_NAMED]]
    etc = ", ..." if len(rows) > 1 + MOST_NAMED else ""
    return f" (and in {len(rows) - 1} more: {', '.join(named)}{etc})"


def first_prompts(config: Config) -> dict[str, Prompt]:
    """Return the first prompt of each set by the set's key, without the sets whose first row is wrong."""
    found = {}
    for each in all_sets(config):
        try:
            found[each.key] = load_prompts(each.path, each.data, 1)[0]
        except (ValueError, OSError):  # told by `data_file_problems`
            continue
    return found
