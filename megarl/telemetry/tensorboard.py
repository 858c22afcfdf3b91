"""TensorBoard scalars without the tensorboard package: an event file is a TFRecord of protobuf messages.

Format: tensorflow/core/lib/io/record_writer.h (length, masked CRC-32C, data, masked CRC-32C), event.proto
(wall_time = 1: double, step = 2: int64, file_version = 3: string,
summary = 5: Summary{value = 1: Value{tag = 1: string, simple_value = 2: float}}).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class TensorBoardSink:
    """Writes `events.out.tfevents.*` into `directory`; one event per step with all its scalars."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.megarl"
        self._file = (directory / name).open("ab")
        self._record(_bytes_field(3, b"brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(
            _bytes_field(1, _bytes_field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._record(b"\x10" + _varint(step) + _bytes_field(5, summary))

    def roll_back(self, step: int) -> None:
        """Viewers drop what earlier files hold beyond `step` (Event.session_log = 7, SessionLog.status START = 1)."""
        self._record(b"\x10" + _varint(step + 1) + _bytes_field(7, b"\x08\x01"))

    def close(self) -> None:
        self._file.close()

    def _record(self, event: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(event))
        self._file.write(
            length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
        )
        self._file.flush()
