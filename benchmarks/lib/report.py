"""The report of a benchmark: rows of a ratio against its bound, the table, the JSON file and the exit status."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the checkout

# Progress bars would be in the middle of the output; transformers reads this at import.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

NOT_MEASURED = "not measured: a quick run only shows that everything runs; its numbers mean nothing"


@dataclass(frozen=True)
class Ratio:
    """One ratio. `bound` None: reported without a result; `at_least`: a lower bound instead of an upper one."""

    name: str
    ratio: float
    bound: float | None = None
    at_least: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """False for a missed bound, and for a ratio that is not finite."""
        if not math.isfinite(self.ratio):
            return False
        if self.bound is None:
            return True
        return self.ratio >= self.bound if self.at_least else self.ratio <= self.bound

    @property
    def result(self) -> str:
        if self.bound is None and self.ok:
            return ""
        return "ok" if self.ok else "MISSED"

    def record(self, measured: bool) -> dict[str, Any]:
        """Return the row as JSON content; `ok` is None if nothing was measured."""
        ratio = round(self.ratio, 4) if math.isfinite(self.ratio) else None
        ok = self.ok if measured else None
        return {"name": self.name, "ratio": ratio, "bound": self.bound, "ok": ok, "details": self.details}


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, with the options that all have: `--json` and `--quick`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: check that it runs, measure nothing")
    return parser


def finish(rows: Sequence[Ratio], options: argparse.Namespace) -> int:
    """Print the table and write the JSON file; return the exit status: 1 if a bound is missed, never for `--quick`."""
    measured = not options.quick
    print(table(rows, measured))
    if options.json is not None:
        options.json.write_text(json.dumps([row.record(measured) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0 if not measured or all(row.ok for row in rows) else 1


def table(rows: Sequence[Ratio], measured: bool) -> str:
    """Return the rows as lines of text, each followed by its details."""
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"{'name':<{width}} {'ratio':>8}  {'bound':>7}"]
    for row in rows:
        bound = "" if row.bound is None else f"{'>=' if row.at_least else '<='} {row.bound:g}"
        result = row.result if measured else ""
        lines.append(f"{row.name:<{width}} {row.ratio:>8.3f}  {bound:>7}  {result}".rstrip())
        lines += [f"    {name}: {value}" for name, value in row.details.items()]
    return "\n".join(lines if measured else [*lines, NOT_MEASURED])
