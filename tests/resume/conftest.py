"""The trainer tests' tiny models and samples."""

from __future__ import annotations

from tests.trainer.conftest import model_dir, samples_of

__all__ = ["model_dir", "samples_of"]
