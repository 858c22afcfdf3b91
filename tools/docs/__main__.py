"""`python -m tools.docs` writes the pages of docs/ that are made from the code or from kept runs, and a dashboard."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.docs.commands_page import commands_page
from tools.docs.errors_page import errors_page
from tools.docs.events_page import events_page
from tools.docs.grafana import dashboard
from tools.docs.metrics_page import metrics_page
from tools.docs.options import keys_page
from tools.docs.results_page import results_page

PAGES = {
    "reference/keys.md": keys_page,
    "reference/metrics.md": metrics_page,
    "reference/commands.md": commands_page,
    "reference/events.md": events_page,
    "reference/errors.md": errors_page,
    "reference/grafana.json": dashboard,
    "results.md": results_page,
}


def main(argv: list[str] | None = None) -> int:
    """Write the files that differ from the code, or with `--check` name them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="directory (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is out of date")
    options = parser.parse_args(argv)
    made = {options.out / name: page() for name, page in PAGES.items()}
    stale = [path for path, text in made.items() if not _holds(path, text)]
    for path in () if options.check else stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path], encoding="utf-8")
    verb = "out of date (run make docs)" if options.check else "written"
    sys.stdout.write("".join(f"{path}: {verb}\n" for path in stale) or "docs are up to date\n")
    return 1 if stale and options.check else 0


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
