"""A first test on a machine with one CUDA device, about half an hour: what only a device can show, with bounds.

    python benchmarks/gpu_smoke.py [--steps a,b] [--json FILE] [--append docs/gpu.md] [--device cuda|cpu]

Steps, each in a process of its own with a deadline, so that one that hangs or crashes costs only itself (one that hangs
shows before its end where it is):

- streams: a broadcast of another thread next to pending work, on the default stream and on one of its own; timeout and
  abort of NCCL in blocking mode; a publish behind pending work, and its deadline
- digest: a bucket's digest on the device against the CPU's, and its time against a copy
- export: a mixture of experts exported and packed on the device against its files
- parity: log-probs, dense, MoE and with Gated DeltaNet, fp32 and bf16, and of two layers of Qwen3-8B's sizes, against
  transformers on the CPU; updates lower the loss
- speed: bf16 updates at Qwen3-8B's layer sizes against a matrix product, the memory plan, and new lengths
- head: the chunked log-probs at Qwen3's vocabulary against torch.compile
- state: save and resume, the reference model's offload
- two_ranks: TP 2 on one device, over gloo
- shared: the trainer's state parked and restored, a buffer relayed to another process, what a sleeping engine keeps

`--device cpu`, or `--quick`, runs the same code with tiny shapes on the CPU platform, in five minutes, without the
step `streams`; its times say nothing about a GPU. `--append` adds the table with the device, the date and
the versions to a page. Exit status: 0 if all bounds hold, 1 if not, 2 without a CUDA device.
"""

import argparse
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # it runs as a script, before anything is installed
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.smoke.rows import StepResult, Where, read_step, table, write_step  # noqa: E402

DUMP_BEFORE_S = 10.0  # the end of a step's time, at which a step that hangs shows where
SHOWN = 4000  # last characters of what a failed step has printed
PACKAGES = ("torch", "megatron-core", "transformer-engine", "vllm", "transformers", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Step:
    """A function `module:name` of the package benchmarks.smoke, and the seconds after which its process is ended."""

    function: str
    limit_s: float


STEPS = {
    "streams": Step("streams:run", 120),
    "digest": Step("transfers:digest_step", 120),
    "export": Step("transfers:export_step", 180),
    "parity": Step("training:parity", 240),
    "speed": Step("training:speed", 420),
    "head": Step("head:run", 180),
    "state": Step("state:run", 240),
    "two_ranks": Step("training:two_ranks", 180),
    "shared": Step("shared:run", 240),
}  # their limits add up to about half an hour


def run_step(name: str, device: str, limit_s: float) -> StepResult:
    """Run one step in a new process; it is ended after `limit_s` seconds. Show what a step that failed has printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--device", device, "--in-process", name, "--json", str(path)]
        command += ["--dump-at", str(time.time() + limit_s - DUMP_BEFORE_S)]
        started = time.perf_counter()
        try:
            environment = environment_of(name)
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, env=environment, check=False
            )
            printed = done.stderr
            lines = [line for line in printed.splitlines() if line.strip()]
            error = "" if done.returncode == 0 else f"exit status {done.returncode}: {lines[-1] if lines else ''}"
        except subprocess.TimeoutExpired as expired:
            error = f"no end within {limit_s:.0f} s"
            # Its type does not follow `text`.
            printed = expired.stderr.decode(errors="replace") if isinstance(expired.stderr, bytes) else ""
        if error:
            sys.stderr.write(printed[-SHOWN:])
        return read_step(path, name, time.perf_counter() - started, error)


def environment_of(name: str) -> dict[str, str]:
    """Return the environment of a step's process.

    Transformer Engine's fp32 products are TF32 otherwise. cuBLAS reads the variable when it is loaded, so it must be
    set before the process starts.
    """
    return dict(os.environ) | ({"NVIDIA_TF32_OVERRIDE": "0"} if name in ("parity", "two_ranks") else {})


def run_in_process(name: str, device: str, path: Path, dump_at: float | None) -> None:
    """Run one step here, and write its rows. At the time `dump_at` all threads show where they are."""
    if dump_at is not None:
        faulthandler.dump_traceback_later(max(0.1, dump_at - time.time()))
    module, _, function = STEPS[name].function.partition(":")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    where = Where(torch.device(device), tiny=device == "cpu")
    rows, left_out = getattr(importlib.import_module(f"benchmarks.smoke.{module}"), function)(where)
    write_step(path, rows, left_out)
    sys.stdout.flush()
    # Not through the interpreter's end: a group with a pending collective waits there.
    os._exit(0)


def heading(device: str) -> str:
    """Return the line above a table in a page: device, date (UTC) and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (tiny shapes: this tests the script only)"
    found = [f"{package} {text}" for package in PACKAGES if (text := _version(package))]
    if device == "cuda":
        found.append(f"CUDA {torch.version.cuda}")
    return f"### {name}, {datetime.now(UTC):%Y-%m-%d}\n\n{', '.join(found)}\n"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def append(page: Path, results: Sequence[StepResult], device: str) -> None:
    """Add the table to the end of a Markdown page."""
    text = page.read_text(encoding="utf-8").rstrip("\n") if page.is_file() else "# Results"
    page.write_text(f"{text}\n\n{heading(device)}\n{table(results)}", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_const", dest="device", const="cpu", help="as --device cpu")
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated (default: all)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--append", type=Path, help="append the table to this page")
    parser.add_argument("--in-process", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--dump-at", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.steps = [name for name in options.steps.split(",") if name]
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"unknown steps: {', '.join(unknown)}; there are: {', '.join(STEPS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.in_process:
        run_in_process(options.in_process, options.device, options.json, options.dump_at)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_smoke: no CUDA device; --device cpu runs the same on the CPU platform\n")
        return 2
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    os.environ["PYTHONPATH"] = path  # of this checkout, installed or not
    results = []
    for name in options.steps:
        results.append(run_step(name, options.device, STEPS[name].limit_s))
        sys.stderr.write(f"{name}: {'ok' if results[-1].ok else 'FAILED'} in {results[-1].seconds:.0f} s\n")
    sys.stdout.write(f"{heading(options.device)}\n{table(results)}")
    if options.json:
        rows = [{**row.record(measured=True), "name": f"gpu_smoke {result.step}: {row.name}"}
                for result in results for row in result.rows]  # fmt: skip
        rows += [{"name": f"gpu_smoke {result.step}", "ratio": None, "bound": None, "ok": False,
                  "details": {"error": result.error}} for result in results if result.error]  # fmt: skip
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if options.append:
        append(options.append, results, options.device)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
