"""The filter's program, run by an interpreter of the few instructions that it uses."""

import errno
import struct

import pytest

from megarl.sandbox.seccomp import MACHINES, filter_program

ALLOW, KILL = "allow", "kill"


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> str | int:
    """The decision of the filter: ALLOW, KILL or an errno."""
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    padded = (*arguments, *(0 for _ in range(6 - len(arguments))))
    data = struct.pack("=IIQ6Q", number, audit or MACHINES[machine].audit, 0, *padded)
    place, loaded = 0, 0
    while True:
        code, yes, no, value = program[place]
        place += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
            case 0x15:
                place += yes if loaded == value else no
            case 0x35:
                place += yes if loaded >= value else no
            case 0x45:
                place += yes if loaded & value else no
            case 0x06:
                return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value, value & 0xFFFF)
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_ordinary_calls_are_allowed_and_all_others_refused(machine: str) -> None:
    calls = MACHINES[machine].calls
    narrowed = {"socket", "socketpair", "clone", "clone3", "ioctl"}
    allowed = {number for number in range(440) if verdict(machine, number, 99) == ALLOW}
    named = {number for name, number in calls.items() if number < 440 and name not in narrowed}
    assert allowed == named | {calls["clone"], calls["ioctl"]}
    assert verdict(machine, 1000) == errno.ENOSYS  # a call of a later kernel


@pytest.mark.parametrize(
    ("name", "x86_64", "aarch64"),
    [
        ("ptrace", 101, 117), ("mount", 165, 40), ("unshare", 272, 97), ("setns", 308, 268), ("bpf", 321, 280),
        ("keyctl", 250, 219), ("io_uring_setup", 425, 425), ("userfaultfd", 323, 282), ("perf_event_open", 298, 241),
        ("process_vm_readv", 310, 270), ("memfd_create", 319, 279), ("chroot", 161, 51), ("personality", 135, 92),
        ("kexec_load", 246, 104), ("init_module", 175, 105), ("shmget", 29, 194), ("pidfd_getfd", 438, 438),
        ("fsopen", 430, 430), ("open_by_handle_at", 304, 265), ("reboot", 169, 142), ("syslog", 103, 116),
    ],
)  # fmt: skip
def test_dangerous_calls_are_refused(name: str, x86_64: int, aarch64: int) -> None:
    assert verdict("x86_64", x86_64) == errno.EPERM, name
    assert verdict("aarch64", aarch64) == errno.EPERM, name


@pytest.mark.parametrize("machine", list(MACHINES))
def test_narrowed_calls(machine: str) -> None:
    calls = MACHINES[machine].calls
    for name in ("socket", "socketpair"):
        assert verdict(machine, calls[name], 1) == ALLOW  # AF_UNIX
        for family in (0, 2, 10, 16, 17, 38, 40):  # unspecified, IPv4, IPv6, netlink, packet, alg, vsock
            assert verdict(machine, calls[name], family) == errno.EPERM
    assert verdict(machine, calls["clone"], 0x3D0F00) == ALLOW  # a thread
    for bit in (0x20000, *(1 << shift for shift in range(25, 31))):  # the bits CLONE_NEW*
        assert verdict(machine, calls["clone"], bit | 17) == errno.EPERM
        assert verdict(machine, calls["clone"], bit | 17 | 1 << 40) == errno.EPERM
    assert verdict(machine, calls["clone3"]) == errno.ENOSYS
    assert verdict(machine, calls["ioctl"], 0, 0x5401) == ALLOW  # TCGETS
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):  # the kernel, too, reads only 32 bits of it
        assert verdict(machine, calls["ioctl"], 0, request) == errno.EPERM


def test_other_conventions_for_calls_end_the_program() -> None:
    assert verdict("x86_64", 0, audit=0x40000003) == KILL  # the calls of 32-bit programs, whose numbers differ
    assert verdict("x86_64", 0x40000000 | 39) == KILL  # x32
    assert verdict("aarch64", 0, audit=0x40000028) == KILL


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")
