"""Messages between a process and its child: a length, then as many bytes.

Both sides are bounded: a message that is longer than the receiver expects is refused before it is read, and a whole
message must arrive within the given time. `multiprocessing.connection` has neither bound.
"""

import asyncio
import socket
import struct
import time

_LENGTH = struct.Struct("!I")


class FrameError(RuntimeError):
    """The peer sent a message that is longer than the receiver allows."""


def send_frame(connection: socket.socket, payload: bytes, timeout_s: float | None = None) -> None:
    """Send one message; raises TimeoutError if the peer has not taken all of it in time, OSError if it has ended."""
    connection.settimeout(timeout_s)
    connection.sendall(framed(payload))


def framed(payload: bytes) -> bytes:
    """Return a message as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Return the next message from a stream. The caller bounds the time.

    Raises EOFError or another OSError if the peer has ended, and FrameError if it is longer than `limit` bytes.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise FrameError(f"a message of {length} bytes, with a limit of {limit}")
    return await reader.readexactly(length)


def receive_frame(connection: socket.socket, limit: int, timeout_s: float | None = None) -> bytes:
    """Return the next message.

    Raises TimeoutError if the whole of it is not there in time, EOFError or another OSError if the peer has ended, and
    FrameError if it is longer than `limit` bytes.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > limit:
        raise FrameError(f"a message of {length} bytes, with a limit of {limit}")
    return _receive(connection, length, deadline)


def _receive(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    """Return exactly `length` bytes."""
    received = bytearray()
    while len(received) < length:
        if deadline is None:
            connection.settimeout(None)
        else:
            # A time-out of 0 would mean that the socket does not block.
            connection.settimeout(max(1e-6, deadline - time.monotonic()))
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
        if deadline is not None and len(received) < length and time.monotonic() > deadline:
            raise TimeoutError(f"{len(received)} of {length} bytes in time")
    return bytes(received)
