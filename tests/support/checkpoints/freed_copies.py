"""Prints how much a converter's workers have grown by copies that they freed: `python -m
tests.support.checkpoints.freed_copies`.

It is a process of its own: pytest's may have freed memory on its heap, which its forked workers would fill again.
"""

import json
import sys
import tempfile
from pathlib import Path

from megarl.checkpoint.convert.workers import ReportBytes, run_units

UNITS = 8


def private_mib() -> float:
    """Return the memory of this process that no other one shares, in MiB."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 2**10


def main(copy_mib: int, directory: Path) -> None:
    """Let two workers make copies of `copy_mib`, each below a small object that lives on; print each one's growth."""
    kept: list[bytearray] = []
    before: list[float] = []

    def copies(number: int, report: ReportBytes) -> None:
        before.append(private_mib())
        for _ in range(2):  # the first one that is freed raises glibc's own limit
            copy = bytearray(copy_mib * 2**20)
            copy[::4096] = b"x" * len(copy[::4096])
            kept.append(bytearray(2**16))
            del copy
        (directory / str(number)).write_text(str(private_mib() - before[0]))

    run_units(range(UNITS), copies, 2, lambda _: None)
    print(json.dumps([float((directory / str(number)).read_text()) for number in range(UNITS)]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(int(sys.argv[1]), Path(directory))
