"""The secret of a run, by which its processes recognise each other's values: RUN_DIR/secret, of mode 0600.

The first process that needs it makes it; all others read the same file. So no process waits for another, and several
nodes need only the shared file system with RUN_DIR. The secret is never sent: messages use keys that are derived from
it for one purpose.
"""

import errno
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

# The run's token, which its processes share and no stranger has, and keys for single purposes that derive from it.
#
# The token is the one by which the processes authenticate to the run's Ray; `access_environment` in
# megarl/cluster/pool/ray_head.py makes it. Like Ray, a process finds it through its environment.

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
                f"process {os.getpid()} has no token of the run ({error}), and without it any stranger could write to "
                f"the run's sockets: without ray.address in the config, unset RAY_AUTH_MODE, so that the run makes a "
                "token of its own; with ray.address, set RAY_AUTH_TOKEN_PATH to the token of that Ray cluster, in the "
                "environment of every one of its nodes too"
            ) from None
    if len(token) < MIN_CHARACTERS:
        raise ValueError(f"the token in {where} has {len(token)} characters; it must have at least {MIN_CHARACTERS}")
    return token


def derive_key(purpose: str) -> bytes:
    """Return the 32 bytes of the key for `purpose`, the same in every process of the run."""
    return hmac.digest(run_token().encode(), purpose.encode(), hashlib.sha256)


SECRET_FILE = "secret"
# Environment variable with RUN_DIR, for torchrun, which has no config (megarl/cluster/torchrun/rendezvous.py).
RUN_DIR_VARIABLE = "MEGARL_RUN_DIR"
_BYTES = 32
# What `os.link` reports where there are none: vfat and exFAT, some FUSE and object stores.
_NO_HARD_LINKS = {errno.ENOTSUP, errno.EPERM, errno.ENOSYS}


def run_secret(run_dir: Path | str) -> bytes:
    """Return the secret of the run in `run_dir`, which is made if there is none.

    Raises PermissionError if other users can read or replace the file: a secret that they know protects nothing.
    """
    path = Path(run_dir).resolve() / SECRET_FILE
    if not path.exists():
        _make(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "r", encoding="ascii") as file:
        facts = os.fstat(file.fileno())
        text = file.read()
    # A file server may give root's files to another user, to whom RUN_DIR then belongs too.
    if facts.st_uid not in {os.geteuid(), path.parent.stat().st_uid} or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(facts.st_mode):04o} and belongs to user {facts.st_uid}, so other users may "
            "know the secret of the run: end the processes of the run, remove the file and start again"
        )
    if len(text) != 2 * _BYTES:
        raise ValueError(f"{path} is damaged: end the processes of the run, remove the file and start again")
    return bytes.fromhex(text)


def derived_key(secret: bytes, purpose: str) -> bytes:
    """Return the key of a secret for one purpose; it reveals nothing about the secret or about other keys."""
    return hmac.digest(secret, b"megarl key: " + purpose.encode(), "sha256")


def _make(path: Path) -> None:
    """Write a new secret, unless another process has written one meanwhile. No reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_BYTES))
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)  # atomic, also on NFS
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise OSError(
            error.errno,
            f"the file system of {path.parent} has no hard links ({error.strerror}), without which the processes of a "
            "run could not agree on one secret: set run.dir to a directory of another file system, which all nodes of "
            "the run share",
        ) from None
    finally:
        temporary.unlink()
