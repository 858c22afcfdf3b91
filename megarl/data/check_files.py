"""The check of a run's data files before anything starts: every bad row, not only the first one."""

from __future__ import annotations

from megarl.common.errors import ConfigError
from megarl.config.datasets import HeldOutSet, TrainSet, held_out_sets, train_sets
from megarl.config.schema import Config
from megarl.data.dataset import row_problems

MOST_ROWS = 50_000  # of each file, about a second; the run itself checks all of them
MOST_TOLD = 10  # of each file


def check_data_files(config: Config) -> None:
    """Raise ConfigError with the bad rows of all training and evaluation sets."""
    problems: list[str] = []
    sets: list[TrainSet | HeldOutSet] = [*train_sets(config), *held_out_sets(config)]
    for each in sets:
        try:
            found = row_problems(each.path, each.data, MOST_ROWS)
        except (ValueError, OSError) as error:
            found = [str(error)]
        problems += [f"{each.key}: {problem}" for problem in found[:MOST_TOLD]]
        if (more := len(found) - MOST_TOLD) > 0:
            problems.append(f"{each.key}: {more} more rows of {each.path} are wrong")
    if problems:
        raise ConfigError(problems)
