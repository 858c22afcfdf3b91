"""Locks the sockets of TransferQueue 0.1.11 with ZMQ CURVE, so that only processes of the run can send messages.

TransferQueue unpickles what it receives (serial_utils.py), so anyone who reaches one of its ports could run code in the
process behind it. `lock` replaces `create_zmq_socket` (zmq_utils.py), which creates all of the library's sockets.
ROUTER sockets, which the controller and the storage units bind, use the server's key and admit only the public key of
the run's clients; DEALER sockets, which connect, use the clients' key. libzmq checks the keys in the handshake and in
every later frame, before Python sees it. Both key pairs derive from the run's token
(megarl/common/trust/run_secret.py). The server's public key is secret too, so a stranger cannot start a handshake.

When the required version of TransferQueue changes, check where the new one creates sockets.
"""

import functools
import logging
import threading
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import zmq
from zmq.utils import z85

from megarl.common.trust.run_secret import derive_key

logger = logging.getLogger(__name__)

LIBRARY, VERSION = "TransferQueue", "0.1.11"
DOMAIN = b"megarl"
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks about each client (ZeroMQ RFC 27)


@dataclass(frozen=True)
class KeyPair:
    """One side's CURVE keys, in Z85."""

    public: bytes
    secret: bytes


@functools.cache
def key_pair(side: str) -> KeyPair:
    """Return the keys of `side`, `server` or `client`. Raises ValueError if the process lacks the run's token."""
    secret = z85.encode(derive_key(f"queue {side}"))
    return KeyPair(zmq.curve_public(secret), secret)


def lock() -> None:
    """Replace `create_zmq_socket` in every module of TransferQueue that uses it. Idempotent.

    Raises RuntimeError if another version of TransferQueue is installed.
    """
    if (found := metadata.version(LIBRARY)) != VERSION:
        raise RuntimeError(f"megarl can only lock {LIBRARY} {VERSION}, but {found} is installed; install {VERSION}")
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage
    from transfer_queue.storage.managers import base
    from transfer_queue.utils import zmq_utils

    for module in (zmq_utils, controller, simple_storage, base):
        if module.create_zmq_socket is not create_locked_socket:
            create_locked_socket.__wrapped__ = module.create_zmq_socket  # type: ignore[attr-defined]
            module.create_zmq_socket = create_locked_socket


def create_locked_socket(
    ctx: zmq.Context[Any], socket_type: int, ip: str, identity: bytes | None = None
) -> zmq.Socket[Any]:
    """Create a socket as the library does, and lock it. Raises ValueError for a type that the library does not use.

    Ray sends the library's actor classes with this function by name, so an actor's process applies the patch here.
    """
    if not hasattr(create_locked_socket, "__wrapped__"):
        lock()
    socket = create_locked_socket.__wrapped__(ctx, socket_type, ip, identity)  # type: ignore[attr-defined]
    try:
        if socket_type == zmq.ROUTER:
            _answer_for(ctx)
            socket.zap_domain = DOMAIN
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # a client without a verdict is refused
            socket.curve_secretkey = key_pair("server").secret
            socket.curve_server = 1
        elif socket_type == zmq.DEALER:
            socket.curve_serverkey = key_pair("server").public
            socket.curve_publickey, socket.curve_secretkey = key_pair("client").public, key_pair("client").secret
        else:
            raise ValueError(f"{LIBRARY} {VERSION} makes ROUTER and DEALER sockets only; cannot lock {socket_type!r}")
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _answer_for(ctx: zmq.Context[Any]) -> None:
    """Start the thread that answers libzmq's questions about clients of this context, unless it has one.

    `zmq.auth.thread` does not end with its context: a storage unit that ends would wait for it forever.
    """
    questions = ctx.socket(zmq.REP, socket_class=zmq.Socket)
    questions.linger = 0
    try:
        questions.bind(ZAP_ADDRESS)
    except zmq.ZMQError as error:
        questions.close()
        if error.errno != zmq.EADDRINUSE:
            raise
        return
    admitted = key_pair("client").public
    threading.Thread(target=_answer, args=(questions, admitted), name="queue-admission", daemon=True).start()


def _answer(questions: zmq.Socket[bytes], admitted: bytes) -> None:
    """Answer until the context ends: status 200 for clients with the key `admitted`, 400 for all others."""
    try:
        while True:
            version, number, _, address, _, mechanism, *credentials = questions.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [z85.decode(admitted)]
            if not known:
                logger.warning("refused a connection from %s to the trajectory queue", address.decode())
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            questions.send_multipart([version, number, *status, b"", b""])
    except zmq.ContextTerminated:
        questions.close()
