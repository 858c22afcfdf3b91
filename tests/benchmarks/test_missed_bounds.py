"""Every benchmark judges by `report.finish`, and its yardsticks are those that were asked for."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, convert, loop_overhead, weight_sync
from tests.support.checkout import ROOT

# Parts of other scripts, which start them, and the smoke test of a GPU, whose status its own test checks.
NO_BENCHMARKS = {"soak_accounting", "door_sessions", "trl_race_engine", "trl_race_grpo", "gpu_smoke"}


def scripts() -> list[Path]:
    found = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())
    return [path for path in found if path.stem not in NO_BENCHMARKS]


def calls(node: ast.AST) -> set[str]:
    """Names of the functions that are called anywhere below a node."""
    found = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {each.id for each in found if isinstance(each, ast.Name)}


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_a_missed_bound_is_the_exit_status_of_every_benchmark(path: Path) -> None:
    """The rows go to `finish`, what it returns is what `main` returns, and that is how the process exits."""
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert calls(tree) & {"add_json", "add_options"}
    inside = list(ast.walk(functions["main"]))
    judged = {
        target.id
        for node in inside
        if isinstance(node, ast.Assign) and "finish" in calls(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def judges(value: ast.expr) -> bool:
        names = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
        return "finish" in calls(value) or bool(judged & names)

    returned = [node.value for node in inside if isinstance(node, ast.Return) and node.value is not None]
    assert any(map(judges, returned))
    # Anything else is a failure, or a rank, which has nothing to judge.
    others = [ast.unparse(value) for value in returned if not judges(value) and not isinstance(value, ast.Constant)]
    assert others == []
    last = ast.unparse(tree.body[-1])
    assert last.startswith("if __name__ == '__main__':")
    assert last.endswith(("sys.exit(main())", "raise SystemExit(main())"))


def test_there_are_benchmarks_of_every_kind() -> None:
    names = {path.stem for path in scripts()}
    assert {"loop_overhead", "weight_sync", "checkpoint", "convert", "train_throughput", "sync_scale"} <= names


@pytest.mark.parametrize(("overhead_s", "step_s", "status"), [(0.1, 1.4, 0), (0.2, 1.4, 1), (0.4, 10.0, 1)])
def test_the_loops_overhead_has_two_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overhead_s: float, step_s: float, status: int
) -> None:
    phases = {f"time/{name}": 0.1 for name in ("generate", "queue", "logprobs", "update", "sync", "other")}
    step = {"time/overhead": overhead_s, "time/step": step_s, "rollout/engine_seconds": 1.0, **phases}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for _ in range(4)))
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["loop_overhead.py", "--run", str(tmp_path), "--json", str(rows)])
    assert loop_overhead.main() == status
    assert all(row["ok"] for row in json.loads(rows.read_text())) == (status == 0)


MIB = 2**20
MEASURED = {
    "seconds": {"sync": 1.1, "sync without digest": 1.0, "gather": 0.3, "broadcast 64 MiB": 0.2, "load": 0.4},
    "bytes": 514 * MIB, "buckets": 8, "bucket_bytes": 64 * MIB, "largest_tensor": 94 * MIB, "largest_fused": 18 * MIB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("process", "peak_mib", "ok"),
    [
        ("engine, in place", 228, True), ("engine, in place", 229, False),  # 3 buckets and 2 fused modules
        ("engine, layer-wise reload", 228, True), ("engine, layer-wise reload", 300, False),  # not 2 embeddings
        ("trainer rank 0", 286, True), ("trainer rank 0", 287, False),  # 3 buckets and the largest tensor
    ],
)  # fmt: skip
def test_an_engines_memory_is_bounded_by_its_fused_modules(process: str, peak_mib: int, ok: bool) -> None:
    *_, row = weight_sync.make_rows(MEASURED, {process: peak_mib * MIB})
    assert row.name.endswith(process) and row.ok is ok


@pytest.mark.parametrize(("sync_s", "digest_s", "ok"), [(1.35, 0.33, True), (1.36, 0.0, False), (1.0, 0.26, False)])
def test_a_sync_is_bounded_by_the_sum_of_its_parts(sync_s: float, digest_s: float, ok: bool) -> None:
    seconds = {**MEASURED["seconds"], "sync": sync_s + digest_s, "sync without digest": sync_s}  # type: ignore[dict-item]
    assert all(row.ok for row in weight_sync.make_rows({**MEASURED, "seconds": seconds}, {})) is ok


@pytest.mark.parametrize(
    ("alone", "save", "bare", "ok"),
    [
        (1.0, 1.09, 1.0, True), (1.0, 1.11, 1.0, False),  # a tenth, whatever plain I/O costs
        (1.0, 1.23, 1.2, True), (1.0, 1.25, 1.2, False),  # 1.2 times what a bare copy and write cost
        (1.0, 1.11, 0.9, False),
    ],
)  # fmt: skip
def test_the_update_that_overlaps_a_save_is_what_is_bounded(alone: float, save: float, bare: float, ok: bool) -> None:
    seconds = {"update alone": [9.0, alone, 0.1], "update save": [9.0, save, 0.1], "update bare": [9.0, bare, 0.1]}
    row = checkpoint.stall_row({"seconds": seconds, "overlapped": {"save": [1], "bare": [1]}})
    assert row.ok is ok and row.name == "checkpoint_stall"


def test_saves_and_loads_are_bounded_by_plain_input_and_output() -> None:
    seconds = {"write": [1.0], "save": [1.9], "read": [1.0], "load": [2.1]}
    save, load = checkpoint.disk_rows({"seconds": seconds, "bytes": 1})
    assert (save.name, save.ok, load.name, load.ok) == ("checkpoint_save", True, "checkpoint_load", False)


SOURCE = 400_000  # bytes of each model


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes below `tmp_path` after each command of a benchmark of conversions, whose commands are plain copies."""
    sizes: list[int] = []
    run, popen = convert.subprocess.run, convert.subprocess.Popen

    def note() -> None:
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

    def run_and_note(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        note()

    class NotedPopen(popen):  # type: ignore[type-arg, valid-type, misc]
        def wait(self, timeout: float | None = None) -> int:
            code: int = super().wait(timeout)
            note()
            return code

    def generate(directory: Path, config: dict[str, Any]) -> Any:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"x" * SOURCE)
        return convert.info_from_config(config)

    monkeypatch.setattr(convert.subprocess, "run", run_and_note)
    monkeypatch.setattr(convert.subprocess, "Popen", NotedPopen)
    monkeypatch.setattr(convert, "generate", generate)
    monkeypatch.setattr(convert, "drop_caches", lambda paths: "not dropped")
    monkeypatch.setattr(convert, "convert_command", lambda *arguments: ["true"])
    monkeypatch.setattr(
        convert.BenchModel, "command",
        lambda model, kind: ["sh", "-c", f"cp -r {model.source(kind)} {model.target(kind)} && sleep 0.2"],
    )  # fmt: skip
    return sizes


def test_conversions_take_30_gb_of_disk_at_most_and_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: list[int]
) -> None:
    """Both models have 8 to 8.4 GB: three of them at once, no fourth."""
    order: list[str] = []
    timed = convert.timed

    def noted(command: list[str], out: Path) -> float:
        order.append(f"{out.parent.name} {out.name}")
        return timed(command, out)

    monkeypatch.setattr(convert, "timed", noted)
    rows = tmp_path / "rows.json"
    arguments = ["convert.py", "--json", str(rows), "--dir", str(tmp_path), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    convert.main()
    most = max(on_disk)
    assert 3 * SOURCE <= most <= 30 / 8.4 * SOURCE
    assert order[:8] == ["dense copy", "dense megatron", "moe copy", "moe megatron"] * 2
    found = {row["name"]: row for row in json.loads(rows.read_text())}
    for kind in ("import", "export"):
        assert found[f"moe_{kind}_per_byte of dense"]["bound"] == 1.5
        for name in ("dense", "moe"):
            assert found[f"{name}_{kind}"]["bound"] == 2.0
            assert found[f"{name}_{kind}_memory"]["details"].keys() >= {"peak_private_mib", "peak_worker_mib_of_2_gb"}
            assert found[f"{name}_{kind}_memory of a process of 2 GB"]["ratio"] > 0
    assert not list(tmp_path.glob("convert-*")), shutil.disk_usage(tmp_path)


def test_memory_that_grows_in_one_process_is_a_missed_bound(tmp_path: Path) -> None:
    model = convert.BenchModel("dense", convert.info_from_config(convert.dense_config(1)), tmp_path, 4)
    small = {"private": 300, "first": 100, "worker": 50, "file": 1}
    for peak, ok in (
        ({"private": 600}, True),
        ({"worker": 63}, False),
        ({"first": 126}, False),
        ({"worker": 62}, True),
    ):
        growth = convert.memory_rows("import", model, small | peak, small)[1]
        assert growth.ok == ok, peak


def test_the_memory_of_each_process_of_a_command_is_measured() -> None:
    """The first process holds 64 MiB; its two children, which hold 32 MiB each, do so at the same time."""
    held = "import time; x = bytearray({} * 2**20); x[::4096] = b'x' * len(x[::4096]); {}"
    child = held.format(32, "time.sleep(1.5)")
    two = f"import subprocess, sys; a = [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in '12']"
    peak = convert.private_memory([sys.executable, "-c", held.format(64, f"{two}; [each.wait() for each in a]")])
    mib = {name: value / 2**20 for name, value in peak.items()}
    assert 64 < mib["first"] < 84 and 32 < mib["worker"] < 52 and 128 < mib["private"] < 190, mib


def test_pages_that_a_worker_shares_with_the_first_process_are_not_its_own() -> None:
    """Forked workers with 16 MiB of their own have 64 MiB in common with their parent, the last one too."""
    text = """
import os, sys, time
shared = bytearray(64 * 2**20)
shared[::4096] = b"x" * len(shared[::4096])
for seconds in (0.5, 1.5):
    if not os.fork():
        own = bytearray(16 * 2**20)
        own[::4096] = b"x" * len(own[::4096])
        time.sleep(seconds)
        os._exit(0)
os.wait(), os.wait()
"""
    peak = convert.private_memory([sys.executable, "-c", text])
    assert 64 < peak["first"] / 2**20 < 84 and 16 <= peak["worker"] / 2**20 < 24, peak


def test_the_models_of_a_conversion_have_the_sizes_that_are_told() -> None:
    for name, config in (("dense", convert.dense_config), ("moe", convert.moe_config)):
        whole = {"dense": convert.DENSE_LAYERS, "moe": convert.MOE_LAYERS}[name]
        for layers, low, high in ((convert.SMALL[name], 1.9e9, 2.1e9), (whole, 8.0e9, 8.5e9)):
            info = convert.info_from_config(config(layers))
            tensors = [shape for entry in convert.table(info).values() for shape in entry.shapes]
            nbytes = sum(2 * convert.torch.Size(shape).numel() for shape in tensors)
            assert low <= nbytes <= high, (name, layers, nbytes)
