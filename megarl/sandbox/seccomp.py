"""Assembles the system call filter of a sandbox, a classic BPF program in the form of seccomp(2). Pure.

Only the calls of `megarl.sandbox.syscalls` are allowed. Of those, four are narrowed by an argument: sockets may only be
Unix sockets (AF_VSOCK, AF_NETLINK and AF_ALG know no network namespace, or widen what can be attacked in the kernel),
`clone` may make no namespace, `ioctl` may not push input into a terminal, and `clone3`, whose flags a filter cannot
read, is reported as missing, after which libc uses `clone`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.sandbox.syscalls import AARCH64, X86_64

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED = _ERROR | errno.EPERM
_MISSING = _ERROR | errno.ENOSYS
_X32_BIT = 0x40000000
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
_AF_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_FIRST_UNKNOWN = 442  # calls that are newer than the tables: libc tries them first, and then the older ones


@dataclass(frozen=True)
class Machine:
    """A kind of processor: AUDIT_ARCH, as the kernel tells it to a filter, and the numbers of the calls."""

    audit: int
    calls: Mapping[str, int]


MACHINES = {"x86_64": Machine(0xC000003E, X86_64), "aarch64": Machine(0xC00000B7, AARCH64)}


def filter_program(machine: str) -> bytes:
    """Return the filter for `machine` (`platform.machine()`) as an array of struct sock_filter.

    Raises ValueError for a machine whose numbers are not known.
    """
    if machine not in MACHINES:
        raise ValueError(f"the sandbox's system call filter is written for {', '.join(MACHINES)}, not for {machine}")
    kind = MACHINES[machine]
    program = [_load(_MACHINE), *_unless_equal(kind.audit, _KILL), _load(_NUMBER)]
    if machine == "x86_64":
        program += [_jump(_JUMP_ABOVE, _X32_BIT, 0, 1), _return(_KILL)]
    program += _narrowed(kind.calls)
    narrowed = {"socket", "socketpair", "clone", "clone3", "ioctl"}
    for number in sorted(number for name, number in kind.calls.items() if name not in narrowed):
        program += _if_equal(number, [_return(_ALLOW)])
    program += [_jump(_JUMP_ABOVE, _FIRST_UNKNOWN, 0, 1), _return(_MISSING), _return(_REFUSED)]
    return b"".join(program)


def _narrowed(calls: Mapping[str, int]) -> list[bytes]:
    """Return the rules for calls that depend on an argument."""
    only_unix = [_load(_ARGUMENTS), *_unless_equal(_AF_UNIX, _REFUSED), _return(_ALLOW)]
    no_namespace = [_load(_ARGUMENTS), _jump(_JUMP_BITS, NEW_NAMESPACES, 0, 1), _return(_REFUSED), _return(_ALLOW)]
    second = _load(_ARGUMENTS + 8)
    no_input = [second, *(part for each in _TERMINAL_INPUT for part in _if_equal(each, [_return(_REFUSED)]))]
    return [
        *_if_equal(calls["socket"], only_unix),
        *_if_equal(calls["socketpair"], only_unix),
        *_if_equal(calls["clone"], no_namespace),
        *_if_equal(calls["clone3"], [_return(_MISSING)]),
        *_if_equal(calls["ioctl"], [*no_input, _return(_ALLOW)]),
    ]


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when_true, when_false, value)


def _load(offset: int) -> bytes:
    """Load 32 bits of the call's data; of an argument, which has 64, the lower half on these little-endian machines."""
    return _instruction(_LOAD, offset)


def _jump(code: int, value: int, when_true: int, when_false: int) -> bytes:
    return _instruction(code, value, when_true, when_false)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, action)


def _if_equal(value: int, then: list[bytes]) -> list[bytes]:
    """Return instructions that run `then` if the loaded value is `value`, and otherwise go on behind it."""
    return [_jump(_JUMP_EQUAL, value, 0, len(then)), *then]


def _unless_equal(value: int, action: int) -> list[bytes]:
    return [_jump(_JUMP_EQUAL, value, 1, 0), _return(action)]
