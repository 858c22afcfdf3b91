"""torchrun's rendezvous backend `megarl`: its stores listen on one address, and its state is signed.

torchrun's own backend `c10d` listens on all addresses of the host and unpickles the state in its store (torch 2.13). So
anyone who reaches the port can run code in every node's torchrun. Here an agent unpickles a state only if another agent
of the same run has signed it.

torchrun finds the backend through the entry point group `torchrun.handlers` (`entry.py`). A job on several
nodes needs MEGARL_RUN_DIR, whose secret the agents have in common; a single agent makes a key for itself.
"""

import contextlib
import hmac
import os
import secrets
import signal
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from megarl.cluster.torchrun import NAME, SERVED_BY_VARIABLE
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE, derived_key, run_secret
from megarl.common.trust.signed_store import connect_store, serve_store

RANKS_STORE_TIMEOUT_S = 300.0  # of one request; torch's own default
_CODE_BYTES = 32
FOREIGN_STATE = (
    "the state of the rendezvous was not written by an agent of this run: a process of another run or of another user "
    "has reached its port. It was not unpickled"
)
SHUTDOWN_S = 30  # torchrun's --shutdown-timeout if the user has not chosen one
MOST_STOP_S = 86400
STOP_KEY = "seconds that the ranks need to stop"
_shutdown = LocalElasticAgent._shutdown


class SignedBackend(C10dRendezvousBackend):
    """c10d's backend, whose states carry a message authentication code (HMAC-SHA256) of run id and content."""

    def __init__(self, store: Store, run_id: str, key: bytes) -> None:
        super().__init__(store, run_id)
        self._sign_key = derived_key(key, f"rendezvous {run_id}")

    @property
    def name(self) -> str:
        """The name of the backend."""
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token. Raises RendezvousStateError for one that no agent of this run has signed."""
        try:
            found = super().get_state()
        except RendezvousStateError:  # not even in the form of a state
            raise RendezvousStateError(FOREIGN_STATE) from None
        return self._verified(found)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Sign and set the state if its token is the current one; return the current state and whether it was set.

        Raises RendezvousStateError as `get_state`.
        """
        if token and not isinstance(token, bytes):  # it is of no state
            current = self.get_state()
            return None if current is None else (*current, False)
        try:
            answer = super().set_state(self._code(state) + state, token)
        except RendezvousStateError:
            raise RendezvousStateError(FOREIGN_STATE) from None
        if answer is None:
            return None
        current = self._verified(answer[:2])
        assert current is not None
        return (*current, answer[2])

    def _code(self, state: bytes) -> bytes:
        return hmac.digest(self._sign_key, state, "sha256")

    def _verified(self, found: tuple[bytes, Token] | None) -> tuple[bytes, Token] | None:
        if found is None:
            return None
        content, token = found
        code, state = content[:_CODE_BYTES], content[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(state)):
            raise RendezvousStateError(FOREIGN_STATE)
        return state, token


class BoundHandler(DynamicRendezvousHandler):
    """torch's handler, whose store for the ranks listens on this node's address alone."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        store = serve_store(master_addr, master_port, RANKS_STORE_TIMEOUT_S)
        wait_for_ranks(store)
        return store


def wait_for_ranks(store: Store) -> None:
    """Extend the shutdown timeout of this process's torchrun to what its ranks requested in `store`.

    torchrun (torch 2.13, elastic/agent/server/api.py) kills its ranks 30 s after it has passed a signal on, which may
    cut a save. The user's own --shutdown-timeout takes precedence. Anyone else who writes to the store can only
    lengthen the wait for ranks that hang. A second signal ends the wait: torch then calls `_shutdown` without a signal.
    """

    def shutdown(agent: LocalElasticAgent, death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_S) -> None:
        if death_sig is None:
            _shutdown(agent, timeout=timeout)
            return
        asked = 0
        with contextlib.suppress(ValueError, RuntimeError):  # torch's errors of stores are RuntimeErrors
            if timeout == SHUTDOWN_S and store.check([STOP_KEY]):
                asked = min(MOST_STOP_S, int(store.get(STOP_KEY)))
        _shutdown(agent, death_sig, max(timeout, asked))

    LocalElasticAgent._shutdown = shutdown  # type: ignore[method-assign,assignment]


def request_seconds_to_stop(environment: Mapping[str, str], seconds: int, timeout_s: float) -> None:
    """Request from this rank's torchrun the time that its ranks may need after a stop signal.

    `environment`: that of the rank; without torchrun's store, or with another rendezvous, nothing is asked.
    `timeout_s`: of a request to the store.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get(SERVED_BY_VARIABLE) == str(
        os.getppid()
    ):
        store = connect_store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout_s)
        store.set(STOP_KEY, str(seconds))


def open_rendezvous(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one agent, and note in the environment that it is safe. Its options are those of `c10d`.

    Raises:
        ValueError: several nodes, and the endpoint, this node's address or MEGARL_RUN_DIR is missing.
        RendezvousConnectionError: the store can neither be served nor be reached.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint or "127.0.0.1:0", default_port=0)
    key = _key_of_one_agent(params) if params.max_nodes == 1 else _key_of_several(params, port)
    store = _open_store(params, host, port)
    options = {f"keep_alive_{name}": params.get_as_int(f"keep_alive_{name}") for name in ("interval", "max_attempt")}
    handler: RendezvousHandler = BoundHandler.from_backend(
        params.run_id,
        store,
        SignedBackend(store, params.run_id, key),
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*(_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))),
        **{name: value for name, value in options.items() if value is not None},
    )
    os.environ[SERVED_BY_VARIABLE] = str(os.getpid())
    return handler


def _key_of_one_agent(params: RendezvousParameters) -> bytes:
    params.local_addr = params.local_addr or "127.0.0.1"
    return secrets.token_bytes(32)


def _key_of_several(params: RendezvousParameters, port: int) -> bytes:
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    missing = {
        "--rdzv-endpoint HOST:PORT": bool(port),
        "--local-addr with this node's address": bool(params.local_addr),
        f"{RUN_DIR_VARIABLE}, the directory of the run on a shared file system,": run_dir,
    }
    for what, given in missing.items():
        if not given:
            raise ValueError(f"--rdzv-backend {NAME} on several nodes also needs {what} on every node")
    return run_secret(str(run_dir))


def _open_store(params: RendezvousParameters, host: str, port: int) -> TCPStore:
    """Serve the store of the rendezvous if this node has the endpoint's address; connect to it otherwise."""
    serves = params.get_as_bool("is_host")
    serves = _matches_machine_hostname(host) if serves is None else serves
    timeout_s = float(params.get_as_int("read_timeout", 60) or 60)
    try:
        return (serve_store if serves else connect_store)(host, port, timeout_s)
    except (OSError, RuntimeError) as error:
        what = "served" if serves else "reached"
        message = f"the store of the rendezvous at {host}:{port} could not be {what}: {error}"
        raise RendezvousConnectionError(message) from error


def _timeout(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)
