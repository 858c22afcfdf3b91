"""The findings of the checks before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.common.errors import ConfigError


@dataclass
class Findings:
    """Lists of what one check has found, or several.

    `problems` refuse the start, as `key: what is wrong; how to fix it`; `warnings` are told at a start and in a dry
    run; `notes` in a dry run only: what it has not checked, or what the run will leave out.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add what another check has found, each text once."""
        for own, new in (
            (self.problems, other.problems),
            (self.warnings, other.warnings),
            (self.notes, other.notes),
        ):
            own += [text for text in dict.fromkeys(new) if text not in own]

    def refuse(self) -> None:
        """Raise ConfigError that lists every problem, if there is one."""
        if self.problems:
            raise ConfigError(self.problems)
