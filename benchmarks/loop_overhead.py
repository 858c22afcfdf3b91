"""Loop overhead of a run: the time outside engine, forward/backward, optimizer and weight sync.

It contains queue, rewards, Ray, planning and logging, and is read from the metrics that the run wrote:

    make quickstart && .venv/bin/python -m benchmarks.loop_overhead --run runs/quickstart --json overhead.json

It takes no time of its own; --quick makes a run of four steps first, in two minutes.

The ratio is relative to the wall time of the same steps. Numbers are medians over all steps but the first, in which
the engine compiles.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.lib.whole_run import QUICKSTART, train

SHARE_BOUND = 0.10
SECONDS_BOUND = 0.300


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """Return the training steps of metrics.jsonl in order; raises ValueError if there are fewer than three."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "time/overhead" in record]
    if len(steps) < 3:
        raise ValueError(f"{run_dir}: {len(steps)} steps recorded, at least 3 are needed; run more steps")
    return steps


def measure(steps: list[dict[str, float]]) -> list[Ratio]:
    """Return the rows of the report."""
    rest = steps[1:]
    share = statistics.median(step["time/overhead"] / step["time/step"] for step in rest)
    seconds = statistics.median(step["time/overhead"] for step in rest)
    phases = ("step", "generate", "queue", "logprobs", "update", "sync", "other")
    details: dict[str, float] = {
        f"{name}_s": round(statistics.median(step[f"time/{name}"] for step in rest), 4) for name in phases
    }
    details["engine_s"] = round(statistics.median(step["rollout/engine_seconds"] for step in rest), 4)
    details["steps"] = len(rest)
    return [
        Ratio("loop_overhead share of the step", share, SHARE_BOUND, details=details),
        Ratio("loop_overhead seconds / 0.3 s", seconds / SECONDS_BOUND, 1.0, details={"overhead_s": round(seconds, 4)}),
    ]


def short_run(directory: Path) -> Path:
    """Make a run of four steps of the quickstart, with a small warm start; return its directory."""
    from examples.quickstart.build import build_assets
    from examples.quickstart.warm_start import WarmStart

    build_assets(directory / "assets", size=WarmStart(steps=5))
    run_dir = directory / "run"
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8")) | {"evaluation": {}}
    config["run"] |= {"dir": str(run_dir), "export": False, "steps": 4}
    config["model"]["path"] = str(directory / "assets" / "model")
    config["data"]["path"] = str(directory / "assets" / "train.jsonl")
    train(config, ranks=2, timeout_s=600.0)
    return run_dir


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="run directory")
    options = parser.parse_args()
    try:
        if options.quick:
            with tempfile.TemporaryDirectory(prefix="loop-overhead-") as name:
                rows = measure(read_steps(short_run(Path(name))))
        else:
            rows = measure(read_steps(options.run))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"loop_overhead: {error}\n")
        return 2
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
