"""Tiny models of every family, as in tests/models."""

from tests.models.conftest import model_dir

__all__ = ["model_dir"]
