"""The run's token, which its processes share and no stranger has, and keys for single purposes that derive from it.

The token is the one by which the processes authenticate to the run's Ray; `access_environment` in
megarl/cluster/pool/ray_head.py makes it. Like Ray, a process finds it through its environment.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

MIN_CHARACTERS = 16


def run_token() -> str:
    """Return the run's token. Raises ValueError, with the fix, if this process has none or it is too short."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    where = "RAY_AUTH_TOKEN"
    if not token:
        file = Path(path) if path else Path.home() / ".ray" / "auth_token"
        where = str(file)
        try:
            token = file.read_text().strip()
        except OSError as error:
            raise ValueError(
                f"process {os.getpid()} has no token of the run ({error}), and without one every stranger could write "
                "to the run's sockets: without ray.address in the config, unset RAY_AUTH_MODE, so that the run makes a "
                "token of its own; with ray.address, set RAY_AUTH_TOKEN_PATH to the token of that Ray cluster, in the "
                "environment of every one of its nodes too"
            ) from None
    if len(token) < MIN_CHARACTERS:
        raise ValueError(f"the token in {where} has {len(token)} characters; it must have at least {MIN_CHARACTERS}")
    return token


def derive_key(purpose: str) -> bytes:
    """Return the 32 bytes of the key for `purpose`, the same in every process of the run."""
    return hmac.digest(run_token().encode(), purpose.encode(), hashlib.sha256)
