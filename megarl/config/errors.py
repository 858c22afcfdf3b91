"""The one exception of this package: a user's mistake, told with its key and its fix."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or several problems of a configuration; `problems` holds one line each, key first."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{head}{len(self.problems)} problems{lines}")
