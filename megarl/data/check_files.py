"""The check of a run's data files before anything starts: every bad row, not only the first one."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.common.errors import ConfigError
from megarl.config.datasets import all_sets
from megarl.config.schema import Config
from megarl.data.dataset import load_prompts, row_problems
from megarl.data.formats import Prompt

MOST_ROWS = 50_000  # of each file, about a second; the run itself checks all of them
MOST_TOLD = 10  # of each file


def check_data_files(config: Config) -> None:
    """Raise ConfigError with the bad rows of all training and evaluation sets."""
    if problems := list(data_file_problems(config)):
        raise ConfigError(problems)


def data_file_problems(config: Config) -> Iterator[str]:
    """Yield the bad rows of all training and evaluation sets, as `key: file:line: what is wrong`."""
    for each in all_sets(config):
        try:
            found = row_problems(each.path, each.data, MOST_ROWS)
        except (ValueError, OSError) as error:
            found = [str(error)]
        yield from (f"{each.key}: {problem}" for problem in found[:MOST_TOLD])
        if (more := len(found) - MOST_TOLD) > 0:
            yield f"{each.key}: {more} more rows of {each.path} are wrong"


def first_prompts(config: Config) -> dict[str, Prompt]:
    """Return the first prompt of each set by the set's key, without the sets whose first row is wrong."""
    found = {}
    for each in all_sets(config):
        try:
            found[each.key] = load_prompts(each.path, each.data, 1)[0]
        except (ValueError, OSError):  # told by `data_file_problems`
            continue
    return found
