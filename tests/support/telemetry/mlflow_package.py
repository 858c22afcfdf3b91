"""MLflow from a directory of its own, behind the locked packages; `make setup-test` fills it from mlflow.lock."""

import os
import sys
from pathlib import Path

VARIABLE = "MEGARL_MLFLOW"
MISSING = (
    f"MLflow is not here: make setup-test, or set {VARIABLE} to a directory made by "
    "pip install --no-deps --target DIR -r requirements/mlflow.lock"
)


def mlflow_directory() -> Path | None:
    """Return the directory, which is then part of `sys.path`; None if there is none."""
    directory = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "mlflow")
    if not (directory / "mlflow" / "__init__.py").is_file():
        return None
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # at the end: what is locked comes first
    return directory
