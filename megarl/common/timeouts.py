"""Margins between two bounds of one wait, so that the inner one, which knows more, speaks first."""

from __future__ import annotations

# Time that the other ranks grant rank 0 beyond the bound of what it does for them.
GRACE_S = 60.0
