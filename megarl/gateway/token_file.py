"""The token that clients of the gateway send, and the file with the gateway's address."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from megarl.common.files import write_private
from megarl.common.trust.run_secret import MIN_CHARACTERS, derive_key

GATEWAY_FILE = "gateway.json"
TOKEN_FILE = "gateway_token"
_PURPOSE = "megarl: clients of the gateway"


def gateway_token() -> str:
    """Return the token of this run's gateway. It is derived from the run's token and does not give it away."""
    return derive_key(_PURPOSE).hex()


def read_token(path: Path) -> str:
    """Return the token of a file that the user has made. Raises ValueError, with the fix, if others can read it."""
    file = os.open(path, os.O_RDONLY)
    with os.fdopen(file, encoding="utf-8") as opened:
        facts = os.fstat(file)
        token = opened.read().strip()
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or facts.st_uid != os.geteuid():
        raise ValueError(f"{path} can be used by others: make it your own and of mode 0600")
    if len(token) < MIN_CHARACTERS or not token.isascii() or any(each.isspace() for each in token):
        raise ValueError(f"the token in {path} must have at least {MIN_CHARACTERS} ASCII characters and no white space")
    return token


def write_token(run_dir: Path, token: str) -> Path:
    """Write a token to the file that only the user can read; return it."""
    path = run_dir.resolve() / TOKEN_FILE
    write_private(path, token + "\n")
    return path


def write_gateway_file(run_dir: Path, url: str, token_file: Path) -> None:
    """Write RUN_DIR/gateway.json: the URL, and the file with the token."""
    content = {"url": url, "base_url": f"{url}/v1", "token_file": str(token_file)}
    write_private(run_dir / GATEWAY_FILE, json.dumps(content, indent=1) + "\n")


def read_gateway_file(run_dir: Path) -> dict[str, str]:
    """Read what `write_gateway_file` wrote. Raises FileNotFoundError if no gateway has been opened there."""
    content: dict[str, str] = json.loads((run_dir / GATEWAY_FILE).read_text())
    return content
