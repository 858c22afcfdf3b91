"""`python -m tools.docs` writes the pages of docs/ that are made from the code or from kept runs, and a dashboard."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.docs.errors_page import errors_page
from tools.docs.grafana import dashboard
from tools.docs.metrics_page import metrics_page
from tools.docs.options import configuration_page
from tools.docs.results_page import results_page


def main(argv: list[str] | None = None) -> int:
    """Write the files that differ from the code, or with `--check` name them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="directory (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is out of date")
    options = parser.parse_args(argv)
    made = {
        "configuration.md": configuration_page(), "metrics.md": metrics_page(), "errors.md": errors_page(),
        "grafana.json": dashboard(), "results.md": results_page(),
    }  # fmt: skip
    stale = [path for name in made if not _holds(path := options.out / name, made[name])]
    if not options.check:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in stale:
            path.write_text(made[path.name], encoding="utf-8")
    verb = "out of date (run make docs)" if options.check else "written"
    sys.stdout.write("".join(f"{path}: {verb}\n" for path in stale) or "docs are up to date\n")
    return 1 if stale and options.check else 0


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
