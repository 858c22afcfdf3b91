"""TensorBoard's own reader, in a process and a directory of its own; `make setup-test` fills it by tensorboard.lock."""

import json
import os
import subprocess
import sys
from pathlib import Path

VARIABLE = "MEGARL_TENSORBOARD"
DIRECTORY = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "tensorboard")
MISSING = (
    f"TensorBoard is not here: make setup-test, or set {VARIABLE} to a directory made by "
    "pip install --no-deps --target DIR -r requirements/tensorboard.lock"
)
_READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}).Reload()
tags = read.Tags()["scalars"]
print(json.dumps({tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}))
"""


def is_here() -> bool:
    """Return whether TensorBoard is in its directory."""
    return (DIRECTORY / "tensorboard" / "__init__.py").is_file()


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each scalar as TensorBoard shows the event files of a directory, by its tag."""
    path = os.pathsep.join(filter(None, (str(DIRECTORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(directory)], env={**os.environ, "PYTHONPATH": path}, timeout=300, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {tag: [(step, value) for step, value in points] for tag, points in found.items()}
