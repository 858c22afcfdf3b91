"""Binary units in bytes."""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30
