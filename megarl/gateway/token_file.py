"""The token that clients of the gateway send, and the file with the gateway's address."""

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
    """Return the token of this run's gateway. It is derived from the run's token and does not reveal it."""
    return derive_key(_PURPOSE).hex()


def read_token(path: Path) -> str:
    """Return the token in a file of the user. Raises ValueError, with the fix, if others can read it."""
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
    """Write a token to a file that only the user can read; return its path."""
    path = run_dir.resolve() / TOKEN_FILE
    write_private(path, token + "\n")
    return path


def write_gateway_file(run_dir: Path, url: str, token_file: Path) -> None:
    """Write RUN_DIR/gateway.json: the URL, and the path of the token file."""
    content = {"url": url, "base_url": f"{url}/v1", "token_file": str(token_file)}
    write_private(run_dir / GATEWAY_FILE, json.dumps(content, indent=1) + "\n")


def read_gateway_file(run_dir: Path) -> dict[str, str]:
    """Read RUN_DIR/gateway.json. Raises FileNotFoundError if no gateway was opened there."""
    content: dict[str, str] = json.loads((run_dir / GATEWAY_FILE).read_text())
    return content
