"""Shows that a change of structure changed nothing: two commits, the same deterministic runs, bit for bit equal.

    python -m tests.support.repository.compare_trees --before b761bc2e
    python -m tests.support.repository.compare_trees --before 83e36d5 --ascending --quickstart runs/quickstart/assets

checks `--before` out in a temporary worktree and starts the same CPU jobs there and in this tree, all or those of
`--jobs`:

- dense, moe: a dense model under TP2 and a mixture of experts under EP2, six steps with evaluations, an export and a
  checkpoint in the middle, and a second run that goes on from that checkpoint. It compares exported weights, the
  tensors of every checkpoint, the prompts drawn, all recorded trajectories, answers and metrics; timings, the number of
  buckets and fields that the old tree has not are left out, and these fields are named.
- async: time decides what an asynchronous run generates ahead, so each tree records a run (its batches, and the
  schedule of admission's decisions). In this tree's admission each schedule must give the recorded batches again. Both
  trees replay each record: the batches must give the weights that the run has exported, and the same metrics.
- kept: an asynchronous run of the older tree is killed; it goes on in this tree from its checkpoint and its journal,
  with its config as a user rewrites it, and every group ends once.

Each tree gets the names that it has for keys of the config (`older_configs.py`). With `--quickstart` it compares a few
steps of the quickstart's own job instead, with the model and the data of that directory. Exit status 1 names the first
difference. MEGARL_CPU_MATMUL=torch, which the runs get, makes both trees use torch's own RMSNorm, SwiGLU and RoPE
(`megarl/platforms/cpu_kernels.py`), and older ones torch's own float32 products, as trees did that know nothing of
it. With `--packages` the older tree imports other packages, such as the Megatron-Core it was locked with (`make
nightly-upgrade`). With `--ascending` both trees lay the sequences of a micro-batch in ascending order of their samples,
as trees before 596367d did.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas
import torch
import yaml

from megarl.common.rundir.rotating_lines import read_lines
from megarl.queue.dump import read_batch
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from tests.support.checkout import ROOT
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.pool.leftovers import marked
from tests.support.repository.older_configs import REMOVED_VALUES, for_this_tree, keys_of, known_part, renamed_for
from tests.support.runs.run import Run, popen, step_records, tiny_config
from tests.support.runs.whole_runs import (
    JOURNAL_S,
    check_every_group_once,
    contents_of,
    holds_finished_groups,
    kill_everything,
    metric_steps,
    repeatable,
    wait_for,
)

COUNTED_OTHERWISE = ("sync/buckets", "reward/accuracy", "groups/solve_all", "groups/solve_none")
PACKAGES = ".packages"  # a link in the older tree, if it has packages of its own
STEPS, MIDDLE = 6, 3
KEPT_STEPS = 20
ASYNC = {"mode": "async", "sync_interval": 2, "max_staleness": 3}
QUICKSTART_STEPS = 3
RUN_TIMEOUT_S = 600.0
REWARD = (
    "def digit_share(response: str, answer: str) -> float:\n"
    "    return sum(character.isdigit() for character in response) / max(1, len(response))\n"
)
ASCENDING = '''"""Runs a script with the sequences of each micro-batch in ascending order of their samples."""
import runpy, sys
from megarl.trainer import packing
spread = packing._spread
packing._spread = lambda *arguments: [sorted(part) for part in spread(*arguments)]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
'''
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3", "parallel": {"tensor": 2}},
    "moe": {"family": "qwen3_moe", "parallel": {"expert": 2}},
}
# torchrun's own meeting place, because old trees have none.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class DifferenceError(AssertionError):
    """The two trees did not give the same; the message names the run and the first thing that differs."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare this tree with")
    parser.add_argument("--quickstart", type=Path, metavar="ASSETS", help="compare the quickstart, with these assets")
    parser.add_argument("--jobs", nargs="+", choices=(*LAYOUTS, "async", "kept"), default=(*LAYOUTS, "async", "kept"))
    parser.add_argument(
        "--packages", type=Path, metavar="DIR", help="packages of the older tree, such as its Megatron-Core"
    )
    parser.add_argument("--ascending", action="store_true", help="micro-batches have the order from before 596367d")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-trees-")))
        before = work / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.before], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(before)], check=True)
        declare_entry_points(before)
        if options.packages is not None:
            (before / PACKAGES).symlink_to(options.packages.resolve())
        try:
            trees = {"before": before, "after": ROOT}
            if options.quickstart is not None:
                _compare_quickstart(work, trees, options.quickstart.resolve(), ascending=options.ascending)
            for job in options.jobs if options.quickstart is None else ():
                (work / job).mkdir()
                (work / job / "compared_reward.py").write_text(REWARD)
                if job in LAYOUTS:
                    _compare_layout(job, work / job, trees, LAYOUTS[job], ascending=options.ascending)
                else:
                    {"async": _compare_async, "kept": _resume_older}[job](work / job, trees)
                sys.stdout.write(f"{job}: no difference\n")
                sys.stdout.flush()
        except DifferenceError as difference:
            sys.stderr.write(f"DIFFERENT: {difference}\n")
            return 1
    sys.stdout.write(f"equal, bit for bit: {options.before} and {ROOT}\n")
    return 0


def declare_entry_points(root: Path) -> None:
    """Give a checkout metadata of its own: vLLM and torchrun find megarl's plugins by entry points.

    The first distribution of a name on the path counts, and the installed one names the modules of this tree.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    metadata = root / f"{project['name']}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = (
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    )
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _compare_layout(
    name: str, work: Path, trees: Mapping[str, Path], layout: Mapping[str, Any], *, ascending: bool
) -> None:
    config = tiny_config(work, steps=STEPS, family=layout["family"])
    config["run"]["deterministic"] = True
    config["trainer"]["parallel"] = layout["parallel"]
    config["reward"]["function"] = "compared_reward:digit_share"
    config["checkpoint"] = {"every": MIDDLE, "keep_last": 9}
    config["telemetry"] = {"dump_batches": True}
    config["evaluation"]["every"] = 2
    whole, resumed = {}, {}
    for tree, root in trees.items():
        whole[tree] = _run(root, config, work / tree, work, ascending=ascending)
        checkpoint = whole[tree] / "checkpoints" / f"iter_{MIDDLE:07d}"
        resume = f"checkpoint.resume={checkpoint}"
        resumed[tree] = _run(root, config, work / f"{tree}_resumed", work, resume, ascending=ascending)
        sys.stdout.write(f"{name}: ran {tree}\n")
        sys.stdout.flush()
    for kind, runs in (("whole run", whole), ("resumed run", resumed)):
        compare_runs(f"{name}, {kind}", runs["before"], runs["after"])


def _compare_async(work: Path, trees: Mapping[str, Path]) -> None:
    """Each tree records a run, and both replay it: this tree first, as the older one needs another config.yaml."""
    config = _async_config(work, STEPS)
    for recorder, root in trees.items():
        run_dir = _run(root, config, work / recorder, work, ascending=False)
        for step, scheduled in replay_schedule(read_schedule(run_dir / SCHEDULE_FILE)).items():
            scheduled.check(read_batch(run_dir / "batches", step))
        sys.stdout.write(f"async: ran {recorder}\n")
        for tree in ("after", "before"):
            if (tree, recorder) == ("before", "after"):
                path, keys = run_dir / "config.yaml", keys_of(trees[tree])
                stored = yaml.safe_load(path.read_text())
                path.write_text(yaml.safe_dump(known_part(keys, renamed_for(keys, stored))))
            out = work / f"{recorder}_replayed_by_{tree}"
            arguments = ["-m", "megarl", "replay", "--run-dir", str(run_dir), "--out", str(out), "--export"]
            _finish(trees[tree], [*TORCHRUN, *arguments], work, run_dir)
            sys.stdout.write(f"async: replayed the run of {recorder} in {tree}\n")
            sys.stdout.flush()
        compare_replays(
            f"async, run of {recorder}", run_dir, *(work / f"{recorder}_replayed_by_{tree}" for tree in trees)
        )


def _async_config(work: Path, steps: int) -> dict[str, Any]:
    config = tiny_config(work, steps=steps)
    config |= {"admission": ASYNC, "telemetry": {"dump_batches": True}}
    config["reward"]["function"] = "compared_reward:digit_share"
    return config


def compare_replays(name: str, run: Path, before: Path, after: Path) -> None:
    """DifferenceError unless two replays have given the weights of the run itself, and the same metrics."""
    for tree, replay in (("before", before), ("after", after)):
        weights = [_files(directory / "hf", "*.safetensors") for directory in (run, replay)]
        _same(f"{name}: weights of the run, and of its replay {tree}", *weights)
    metrics = [_lines(replay, [replay / "metrics.jsonl"], _outcomes) for replay in (before, after)]
    _same(f"{name}: metrics of the replays", *_of_both(f"{name}: metrics of the replays", *metrics))


def _resume_older(work: Path, trees: Mapping[str, Path]) -> None:
    """Kill a run of the older tree, and let it go on in this one, with its config as a user rewrites it."""
    config = _async_config(work, KEPT_STEPS)
    config["rollout"]["journal_s"] = JOURNAL_S
    config["checkpoint"] = {"every": 2}
    for name, section in REMOVED_VALUES.items():
        config[name] = config.get(name, {}) | section
    run_dir, groups = work / "kept", config["batch"]["groups"]
    config["run"]["dir"] = str(run_dir)
    process = popen(
        _train(trees["before"], config, work), run_dir, cwd=work, env=_variables(trees["before"], work, run_dir)
    )
    try:
        wait_for(lambda: metric_steps(run_dir) >= 3 and holds_finished_groups(run_dir, groups), process)
    finally:
        kill_everything(process, run_dir)
    sys.stdout.write(f"kept: killed before after {metric_steps(run_dir)} steps\n")
    _run(trees["after"], for_this_tree(config), run_dir, work, ascending=False)
    check_every_group_once(Run(0, "", run_dir), KEPT_STEPS)
    kept = sum(record.get("rollout/groups_kept", 0) for record in step_records(run_dir))
    if not kept:
        raise DifferenceError("kept: no group of the older tree's journal was used again")
    sys.stdout.write(f"kept: {kept:.0f} groups of the journal went on\n")


def _compare_quickstart(work: Path, trees: Mapping[str, Path], assets: Path, *, ascending: bool) -> None:
    """Compare some steps of the quickstart's config, which each tree has as it was; only its length is changed."""
    runs = {}
    for tree, root in trees.items():
        config = yaml.safe_load((root / "examples/rl/configs/quickstart_cpu.yaml").read_text())
        config["run"] |= {"steps": QUICKSTART_STEPS, "deterministic": True}
        config["model"] = {"path": str(assets / "model")}
        config["data"]["path"] = str(assets / "train.jsonl")
        config["evaluation"]["sets"] = [{"name": "additions", "path": str(assets / "heldout.jsonl"), "limit": 64}]
        config |= {"checkpoint": {"every": QUICKSTART_STEPS}, "telemetry": {"dump_batches": True}}
        runs[tree] = _run(root, config, work / tree, work, ascending=ascending)
        sys.stdout.write(f"quickstart: ran {tree}\n")
        sys.stdout.flush()
    compare_runs("quickstart", runs["before"], runs["after"])


def _run(root: Path, config: Mapping[str, Any], run_dir: Path, work: Path, *overrides: str, ascending: bool) -> Path:
    config = {**config, "run": {**config["run"], "dir": str(run_dir)}}
    _finish(root, _train(root, config, work, *overrides, ascending=ascending), work, run_dir)
    return run_dir


def _train(root: Path, config: Mapping[str, Any], work: Path, *overrides: str, ascending: bool = False) -> list[str]:
    """Return the command that starts the tree's own script, with a config whose keys have the names of the tree."""
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(renamed_for(keys_of(root), config)))
    script = [str(root / "examples/rl/train_rl.py")]
    if ascending:
        (work / "ascending.py").write_text(ASCENDING)
        script.insert(0, str(work / "ascending.py"))
    return [*TORCHRUN, *script, "--config", str(path), *overrides]


def _variables(root: Path, work: Path, run_dir: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (root, work, root / PACKAGES)))
    return marked(run_dir, PYTHONPATH=path, MEGARL_CPU_MATMUL="torch")


def _finish(root: Path, command: Sequence[str], work: Path, run_dir: Path) -> None:
    ended = subprocess.run(
        command, cwd=work, env=_variables(root, work, run_dir), text=True, capture_output=True, timeout=RUN_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        raise DifferenceError(f"{root}: the run failed\n{(ended.stdout + ended.stderr)[-4000:]}")


def compare_runs(name: str, before: Path, after: Path) -> None:
    """DifferenceError naming the first difference between two finished runs of one config."""
    _same(f"{name}: exported files", *(_files(run / "hf") for run in (before, after)))
    checkpoints = [sorted(path.name for path in (run / "checkpoints").glob("iter_*")) for run in (before, after)]
    _same(f"{name}: checkpoints", *checkpoints)
    for checkpoint in checkpoints[0]:
        _same(
            f"{name}: tensors of {checkpoint}",
            *({str(key): records_of(value) for key, value in contents_of(run / "checkpoints" / checkpoint).items()}
              for run in (before, after)),
        )  # fmt: skip
    tables = [_batches(run / "batches") for run in (before, after)]
    columns = set.intersection(*({name for row in table.values() for name in row} for table in tables))
    _same(f"{name}: recorded batches", *(_texts(table, columns) for table in tables))
    answers = [_lines(run, sorted(run.glob("eval_*.jsonl"))) for run in (before, after)]
    _same(f"{name}: answers of evaluations", *_of_both(f"{name}: answers of evaluations", *answers))
    samples = [_lines(run, [run / "samples.jsonl"]) for run in (before, after)]
    _same(f"{name}: samples", *_of_both(f"{name}: samples", *samples))
    metrics = [_lines(run, [run / "metrics.jsonl"], _outcomes) for run in (before, after)]
    _same(f"{name}: metrics", *_of_both(f"{name}: metrics", *metrics))


def _outcomes(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a line of metrics says, but for times, and for what another tree counts in another way.

    These are the messages in which weights are sent, and accuracies of graded rewards, which older trees report.
    """
    return {name: value for name, value in repeatable(record).items() if name not in COUNTED_OTHERWISE}


def records_of(stored: bytes) -> dict[str, bytes]:
    """Return what torch.save has written, without the checksums of its archive, which only some trees write."""
    archive = torch._C.PyTorchFileReader(io.BytesIO(stored))
    names = [name for name in archive.get_all_records() if not name.startswith(".data/")]  # an id of the archive
    return {name: archive.get_record(name) for name in names}


def _files(directory: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob(pattern))}


def _lines(
    run_dir: Path, paths: Sequence[Path], kept: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> dict[str, dict[str, Any]]:
    """Return the records of JSON files with the fields that are `kept`, by file and line."""
    return {
        f"{path.relative_to(run_dir)}, line {number}": dict(_flat(kept(json.loads(line))))
        for path in paths
        for number, line in enumerate(read_lines(path))
    }


def _of_both(
    what: str, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return every field by line and name, without those that no line of the old tree has, which are named."""
    known = {name for line in before.values() for name in line}
    new = sorted({name for line in after.values() for name in line} - known)
    if new:
        sys.stdout.write(f"{what}: not compared, as only the new tree has them: {', '.join(new)}\n")
    return [
        {f"{key}, {name}": line[name] for key, line in lines.items() for name in line.keys() & known}
        for lines in (before, after)
    ]


def _batches(directory: Path) -> dict[str, dict[str, Any]]:
    """Return every recorded trajectory with its prompt, without the project's own reader."""
    parts = sorted(directory.glob("*.parquet"))
    rows = [(path.name, row) for path in parts for row in pandas.read_parquet(path).to_dict("records")]
    return {f"{name}, row {number}": dict(_flat(row)) for number, (name, row) in enumerate(rows)}


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row. The fields of a list of records are columns of their own: one tree may have more."""
    for name, value in row.items():
        items = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
            yield from ((f"{name}.{field}", [item[field] for item in items]) for field in items[0])
        else:
            yield name, items


def _texts(table: Mapping[str, Mapping[str, Any]], columns: Collection[str]) -> dict[str, str]:
    """Return the values of `columns` as text. A column that only one tree has says nothing of a difference."""
    return {
        f"{key}, {name}": json.dumps(value, sort_keys=True, default=str)
        for key, row in table.items()
        for name, value in row.items()
        if name in columns
    }


def _same(what: str, before: Any, after: Any) -> None:
    if before == after:
        if not before:
            raise DifferenceError(f"{what}: there are none")
        return
    if isinstance(before, dict):
        keys = [key for key in [*before, *after] if key not in before or key not in after or before[key] != after[key]]
        first = keys[0]
        raise DifferenceError(
            f"{what}: {len(set(keys))} differ, the first is {first}: "
            f"{str(before.get(first))[:200]} before, {str(after.get(first))[:200]} after"
        )
    raise DifferenceError(f"{what}: {before} before, {after} after")


if __name__ == "__main__":
    sys.exit(main())
