#!/usr/bin/env python3
"""Build Transformer Engine's torch extension for the locked torch, with the Python that runs this script.

    .venv-gpu/bin/python tools/build_te.py            # build and install; `make setup-gpu` runs this
    .venv-gpu/bin/python tools/build_te.py --print    # only print the environment and the command

The extension is C++ only. Its setup.py runs `nvcc -V` to get the CUDA version and needs the CUDA, cuDNN and NCCL
headers (transformer-engine-torch 2.20.2, build_tools/utils.py, build_tools/pytorch.py). requirements/gpu.lock installs
all of these, so no CUDA toolkit is needed. CUDA_HOME is used if its nvcc has the same major version. If something is
missing, the exit status is 2, with one message.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "gpu.lock"
PACKAGE = "transformer-engine-torch"
CUDA_MAJOR = 13  # required by the locked torch
GIB_PER_JOB = 4  # for one compiler, on a file that includes torch's headers
BUILD_TIMEOUT_S = 7200


class MissingPartError(Exception):
    """Something the build needs is not on this machine; the message says what to do."""


@dataclass(frozen=True)
class Nvcc:
    """An installed nvcc. `home`: the value for CUDA_HOME; `release`: for example `13.0`."""

    home: Path
    release: str


def find_nvcc(site: Path, environment: Mapping[str, str]) -> Nvcc:
    """Return the first CUDA 13 nvcc, from CUDA_HOME, this environment's packages, PATH or /usr/local/cuda.

    Raises:
        MissingPartError: there is none; the message lists every place and what is there.
    """
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    places = {
        "CUDA_HOME": Path(environment["CUDA_HOME"]) if environment.get("CUDA_HOME") else None,
        "package nvidia-cuda-nvcc": site / "nvidia" / f"cu{CUDA_MAJOR}",
        "PATH": Path(on_path).resolve().parents[1] if on_path else None,
        "/usr/local/cuda": Path("/usr/local/cuda"),
    }
    seen = []
    for name, home in places.items():
        release = _release(home / "bin" / "nvcc") if home else None
        if home and release and release.partition(".")[0] == str(CUDA_MAJOR):
            return Nvcc(home, release)
        seen.append(f"{name}: {f'CUDA {release} at {home}' if release else 'no nvcc'}")
    raise MissingPartError(
        f"no CUDA {CUDA_MAJOR} nvcc found; the build of {PACKAGE} needs it to get the CUDA version.\n"
        + "".join(f"  looked in {line}\n" for line in seen)
        + f"Fix: pip install --no-deps the locked nvidia-cuda-nvcc (requirements/{LOCK.name}), or install the CUDA "
        f"{CUDA_MAJOR} toolkit and set CUDA_HOME to its directory. Without {PACKAGE} a run on GPUs uses Megatron's "
        "own, slower modules."
    )


def _release(nvcc: Path) -> str | None:
    """Return the release in `nvcc -V`'s output; None if it does not run."""
    try:
        done = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release\s+([\d.]+)", done.stdout)
    return match[1] if match else None


def build_environment(site: Path, environment: Mapping[str, str], cores: int, memory_gib: float) -> dict[str, str]:
    """Return the variables the build needs in addition to `environment`.

    `site`: the site-packages directory with NVIDIA's packages. `memory_gib`: the available memory, which limits the
    number of parallel compilers.

    Raises:
        MissingPartError: nvcc, a header or the C++ compiler is missing.
    """
    nvcc = find_nvcc(site, environment)
    cudnn, nccl = site / "nvidia" / "cudnn", site / "nvidia" / "nccl"
    headers = {
        nvcc.home / "include" / "cuda_runtime.h": "nvidia-cuda-runtime, or a CUDA toolkit with headers",
        cudnn / "include" / "cudnn.h": "nvidia-cudnn-cu13",
        nccl / "include" / "nccl.h": "nvidia-nccl-cu13",
        Path(sysconfig.get_paths()["include"]) / "Python.h": "the headers of this Python (Debian: python3-dev)",
    }
    for header, source in headers.items():
        if not header.is_file():
            raise MissingPartError(f"{header} is missing; install {source}")
    if not shutil.which(environment.get("CXX", "c++"), path=environment.get("PATH", "")):
        raise MissingPartError("no C++ compiler; install one (Debian: apt-get install g++)")
    paths = [str(cudnn / "include"), str(nccl / "include"), environment.get("CPATH", "")]
    return {
        "CUDA_HOME": str(nvcc.home),
        "CUDNN_PATH": str(cudnn),
        "CPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")]),  # ninja is there
        "MAX_JOBS": environment.get("MAX_JOBS") or str(max(1, min(cores, int(memory_gib / GIB_PER_JOB)))),
        "NVTE_FRAMEWORK": "pytorch",
        # megarl does not use this part, which needs torch's symmetric memory headers and core functions.
        "NVTE_WITH_NCCL_EP": environment.get("NVTE_WITH_NCCL_EP", "0"),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # else setup.py first looks for an unpinned wheel on GitHub
    }


def check_torch(cuda: str | None) -> None:
    """Raise MissingPartError unless `cuda`, the installed torch's CUDA version, is the one to build for."""
    if cuda is None or cuda.partition(".")[0] != str(CUDA_MAJOR):
        raise MissingPartError(
            f"the installed torch is built for {'CPUs' if cuda is None else f'CUDA {cuda}'}, not CUDA {CUDA_MAJOR}.\n"
            "Fix: pip install --no-deps --force-reinstall the locked torch, with === instead of ==, so that pip does "
            "not take another build of the same version"
        )


def _cuda_of_torch() -> str | None:
    """Return the installed torch's CUDA version; None for a CPU build. Raises MissingPartError without torch."""
    command = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MissingPartError(f"torch cannot be imported: {reason}\nFix: make gpu-packages")
    return done.stdout.strip() or None


def build_command() -> list[str]:
    """Return the pip command that builds and installs the locked version."""
    (pin,) = [line for line in LOCK.read_text().splitlines() if line.startswith(f"{PACKAGE}==")]
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "install", *options, pin]


def _available_gib() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="only_print", help="print only; build nothing")
    options = parser.parse_args()
    site = Path(sysconfig.get_paths()["purelib"])
    try:
        check_torch(_cuda_of_torch())
        added = build_environment(site, os.environ, len(os.sched_getaffinity(0)), _available_gib())
    except MissingPartError as missing:
        sys.stderr.write(f"build_te: {missing}\n")
        return 2
    command = build_command()
    for name, value in added.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    sys.stdout.write(f"{shlex.join(command)}\n")
    sys.stdout.flush()
    if options.only_print:
        return 0
    return subprocess.run(command, env={**os.environ, **added}, timeout=BUILD_TIMEOUT_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
