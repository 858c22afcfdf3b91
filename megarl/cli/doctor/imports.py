"""Findings from imports: tries the imports of a run, each in a separate process.

So a crash, a hang or an unexpected error is one finding. Megatron-Core, for example, catches ImportError around
Transformer Engine, which raises FileNotFoundError without its torch extension.
"""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megarl.cli.doctor.report import Finding

TIMEOUT_S = 300.0
_CUDNN = "cudnn: "
_SHOW_CUDNN = (
    "\nfor line in open('/proc/self/maps'):"
    f"\n    if 'libcudnn.so' in line: print({_CUDNN!r} + line.split(maxsplit=5)[5].strip())"
)


@dataclass(frozen=True)
class Part:
    """The imports of one kind of process: `code` is Python, and runs only if the package `module` is installed."""

    what: str
    code: str
    module: str
    fix: str


TRANSFORMER_ENGINE = Part(
    "import Transformer Engine",
    "from megarl.platforms.platform import check_transformer_engine; check_transformer_engine()" + _SHOW_CUDNN,
    "transformer_engine",
    "build its torch extension: make gpu-te; or pip uninstall transformer-engine for Megatron's own, slower modules",
)  # fmt: skip
PARTS = (
    Part(
        "import trainer", "from megarl import platforms; platforms.activate(); import megarl.run.loop.session",
        "megatron.core", "install the locked packages: make setup, on CUDA make setup-gpu",
    ),
    Part(
        "import engine",
        "import vllm.v1.engine.async_llm, megarl.rollout.engine.replica, megarl.weights.receive.vllm_plugin", "vllm",
        "install the locked packages: make setup, on CUDA make setup-gpu",
    ),
    Part(
        "import pool", "import ray, transfer_queue, math_verify, megarl.rollout.orchestrator.controller", "ray",
        "install the locked packages: make setup, on CUDA make setup-gpu",
    ),
    TRANSFORMER_ENGINE,
    Part("import FlashInfer", "import flashinfer", "flashinfer", "install matching kernels: make gpu-kernels"),
)  # fmt: skip


@dataclass(frozen=True)
class ImportOutcome:
    """The result of an import: exit status (negative: the signal; None: it timed out) and output."""

    status: int | None
    stdout: str
    stderr: str


def run_import(part: Part, timeout_s: float = TIMEOUT_S) -> ImportOutcome:
    """Run the code of `part` in a new process."""
    command = [sys.executable, "-c", part.code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return ImportOutcome(None, "", f"did not finish within {timeout_s:.0f} s")
    return ImportOutcome(done.returncode, done.stdout, done.stderr)


def import_findings(
    cuda: bool, parts: Sequence[Part] = PARTS, run: Callable[[Part], ImportOutcome] = run_import
) -> Iterator[Finding]:
    """Import every installed part, two at a time, and yield the findings.

    Imports Transformer Engine wherever it is installed, because Megatron-Core does so on a CPU too.
    """
    present = [part for part in parts if _is_installed(part.module)]
    if cuda and TRANSFORMER_ENGINE in parts and TRANSFORMER_ENGINE not in present:
        detail = "not installed: Megatron's own, slower modules are used"
        yield Finding("warn", "Transformer Engine", detail, "run make setup-gpu")
    with ThreadPoolExecutor(2) as pool:
        for part, outcome in zip(present, pool.map(run, present), strict=True):
            yield _finding(part, outcome)
            if part is TRANSFORMER_ENGINE and outcome.status == 0:
                yield from _cudnn_findings(outcome.stdout)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _finding(part: Part, outcome: ImportOutcome) -> Finding:
    if outcome.status == 0:
        return Finding("ok", part.what, "works")
    lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()]
    detail = lines[-1][:300] if lines else "no output"
    if outcome.status is not None and outcome.status < 0:
        detail = f"killed by {signal.Signals(-outcome.status).name}: {detail}"
    # A trainer imports Transformer Engine through Megatron-Core, and fails for the same reason.
    fix = TRANSFORMER_ENGINE.fix if "Transformer Engine" in detail else part.fix
    return Finding("fail", part.what, detail, fix)


def _cudnn_findings(stdout: str) -> Iterator[Finding]:
    """Yield a warning if two cuDNNs are loaded: Transformer Engine prefers the system's, torch brings its own."""
    loaded = sorted({line.removeprefix(_CUDNN) for line in stdout.splitlines() if line.startswith(_CUDNN)})
    if len(loaded) > 1:
        fix = "export CUDNN_PATH=SITE-PACKAGES/nvidia/cudnn for all processes of a run (launch.runtime_env)"
        yield Finding("warn", "cuDNN", f"two are loaded: {', '.join(loaded)}", fix)
