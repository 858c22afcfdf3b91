"""Every benchmark comes to its end with --quick, and writes rows. Only in make nightly-benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment

pytestmark = pytest.mark.slow

SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "_parser(__doc__)" in path.read_text() or path.name == "gpu_smoke.py"
)
LIMIT_S = 900


def run(name: str, output: Path) -> list[dict[str, object]]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(output)]
    log = output.with_suffix(".log")
    with log.open("wb") as out:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    rows: list[dict[str, object]] = json.loads(output.read_text())
    return rows


def test_all_benchmarks_are_here() -> None:
    assert len(SCRIPTS) == 13 and {"chaos.soak", "load.control_plane", "weight_sync"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_comes_to_its_end(name: str, tmp_path: Path) -> None:
    rows = run(name, tmp_path / "rows.json")
    assert rows and all(row.keys() == {"name", "ratio", "bound", "ok", "details"} for row in rows)
