"""The report of `megarl doctor`: findings, each with a level and, if something is wrong, a fix."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fail`: a run could not start. `fix`: what to do about it."""

    level: Level
    what: str
    detail: str
    fix: str = ""

    @classmethod
    def warn_if(cls, wrong: bool, what: str, detail: str, fix: str) -> Finding:
        """Return a warning with its fix if something is wrong."""
        return cls("warn", what, detail, fix) if wrong else cls("ok", what, detail)


@dataclass(frozen=True)
class Report:
    """All findings. `device`: the device path that a run would use, from what torch finds."""

    device: Literal["cuda", "cpu"]
    findings: tuple[Finding, ...]

    @property
    def can_start(self) -> bool:
        """True if a run could start here."""
        return not any(finding.level == "fail" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        content = {"device": self.device, "can_start": self.can_start, "findings": list(map(asdict, self.findings))}
        return json.dumps(content, indent=2) + "\n"


def render(report: Report) -> str:
    """Return the report as a table, followed by one line that says whether a run can start."""
    stream = StringIO()
    console = Console(file=stream, width=110, highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        table.add_row(finding.level, finding.what, finding.detail + (f" -> {finding.fix}" if finding.fix else ""))
    console.print(table)
    conclusion = "a run can start" if report.can_start else "a run cannot start: fix what is marked fail"
    console.print(f"\n{conclusion} (device path: {report.device})")
    return stream.getvalue()
