"""Whole runs that are killed: starting, killing, and everything that must repeat."""

import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.common.rundir.rotating_lines import read_lines
from megarl.queue.dump import read_batch
from megarl.telemetry.metrics.declarations import REGISTRY
from tests.support.checkout import ROOT, environment, torchrun
from tests.support.models.tensors import Tensors, differing, read_hf
from tests.support.pool.leftovers import assert_nothing_left, survivors
from tests.support.runs.run import ENTRY, Run, start, step_records, tiny_config
from tests.support.trainer.configs import with_sections

GO_ON_S = 10.0  # beyond the start of an engine and the time in which a silent one is noticed
JOURNAL_S = 0.2  # rollout.journal_s of runs that `holds_finished_groups` is asked about


def config_of(
    directory: Path, model: Path | None = None, *, steps: int = 4, family: str = "qwen3", **sections: Any
) -> dict[str, Any]:
    """Deterministic, a checkpoint after every second step, an evaluation after every step, batches kept."""
    config = tiny_config(directory, steps=steps, family=family)
    if model is not None:
        config["model"]["path"] = str(model)
    config["run"]["deterministic"] = True
    config["checkpoint"] = {"every": 2}
    config["telemetry"] = {"dump_batches": True}
    config["evaluation"]["every"] = 1
    return with_sections(config, sections)


def replay(
    run: Run, out: Path, ranks: int, *overrides: str, checkpoint: int | None = None, steps: int | None = None
) -> Tensors:
    """`megarl replay` of a run, from the start or from its checkpoint of a step; the exported policy."""
    command = torchrun(ranks, "-m", "megarl", "replay", "--run-dir", str(run.directory), "--out", str(out), "--export")
    command += [f"trainer.gpus={ranks}", *overrides]
    if checkpoint is not None:
        command += ["--checkpoint", str(run.directory / "checkpoints" / f"iter_{checkpoint:07d}")]
    command += ["--steps", str(steps)] if steps is not None else []
    result = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return read_hf(out / "hf")


def start_run(
    config: dict[str, Any], *overrides: str, ranks: int = 2, restarts: int = 0, script: Sequence[str] = ENTRY
) -> subprocess.Popen[str]:
    path = Path(config["run"]["dir"]).parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return start(path, *overrides, ranks=ranks, restarts=restarts, script=script)


def wait_for(condition: Callable[[], bool], process: Any, timeout_s: float = 900.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)


def holds_finished_groups(run_dir: Path, groups: int) -> bool:
    """Say whether the journal has finished groups that no checkpoint has: those of the time before it was written."""
    finished = sum(json.loads(line)["event"] == "finish" for line in read_lines(run_dir / "schedule.jsonl"))
    time.sleep(2 * JOURNAL_S)
    saved = CheckpointDirectory(run_dir / "checkpoints").steps()
    return bool(saved) and finished > groups * saved[-1]


def metric_steps(run_dir: Path) -> int:
    """Step lines in metrics.jsonl so far."""
    return len(step_records(run_dir))


def actors(run_dir: Path, name: str) -> list[psutil.Process]:
    """The processes of Ray actors of a class."""
    supervisor = psutil.Process(json.loads((run_dir / "supervisor.json").read_text())["process"]["pid"])
    return [each for each in supervisor.children(recursive=True) if f"ray::{name}" in " ".join(each.cmdline())]


def check_engine_bound(run_dir: Path, first_s: float, lost_at: float, since: int, noticed_s: float = 0.0) -> None:
    """A run whose only engine was lost has gone on within the start of an engine and GO_ON_S.

    `first_s`: the seconds that the first engine took to start. The new one's count if they are more, because the
    machine had more to do, but twice as many at most. `lost_at`: seconds since the epoch, after step `since`.
    `noticed_s`: the seconds in which the run must notice the loss.
    """
    [new] = actors(run_dir, "EngineReplica")
    new_s = start_seconds(run_dir, new.pid, new.create_time())
    gap_s = longest_gap(step_records(run_dir), since, lost_at)
    print(f"the run went on after {gap_s:.0f} s; the engines started in {first_s:.0f} and {new_s:.0f} s")
    assert first_s > 0, "nobody has seen how long an engine takes to start"
    assert gap_s <= noticed_s + max(first_s, min(new_s, 2 * first_s)) + GO_ON_S


def first_engine(run_dir: Path) -> tuple[psutil.Process, float]:
    """The only engine of a run, and the seconds that it took to start."""
    [engine] = actors(run_dir, "EngineReplica")
    return engine, start_seconds(run_dir, engine.pid, engine.create_time())


def longest_gap(records: Sequence[Mapping[str, Any]], since: int, at: float) -> float:
    """Return the longest time in seconds without the end of a step, from a fault on that came after step `since`.

    `at`: when it came, in seconds since the epoch.
    """
    ends = [at, *(record["wall_time"] for record in records[since:])]
    return max((after - before for before, after in itertools.pairwise(ends)), default=0.0)


def start_seconds(run_dir: Path, pid: int, created: float) -> float:
    """Return the seconds from `created` until the replica of process `pid` joined; 0 if its events do not tell.

    `created`: seconds since the epoch. An engine that starts alongside training may be ready before that.
    """
    for path in sorted((run_dir / "events").glob("replica-*.steps.*.jsonl")):
        header, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if header["pid"] != pid:
            continue
        for event in events:
            if event["n"] == "join_group":
                since_header = event["t"] / 1e6 - header["monotonic_ns"] / 1e9
                return float(header["wall_ns"] / 1e9 + since_header - created)
    return 0.0


def ranks_of(process: Any) -> list[psutil.Process]:
    """The trainer ranks that torchrun has running."""
    ranks = []
    for child in psutil.Process(process.pid).children():
        try:
            if "train_rl.py" in " ".join(child.cmdline()):
                ranks.append(child)
        except psutil.Error:
            continue
    return ranks


@contextmanager
def killed_after(process: Any, run_dir: Path) -> Iterator[None]:
    """Kill all of a run that lives on after the block."""
    try:
        yield
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)


def kill_everything(process: Any, run_dir: Path) -> None:
    """SIGKILL to torchrun, ranks, supervisor, Ray and engines, in one go."""
    roots = survivors(run_dir)
    assert {process.pid, *(rank.pid for rank in ranks_of(process))} <= {root.pid for root in roots}
    for each in dict.fromkeys([*roots, *(child for root in roots for child in _below(root))]):
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.communicate(timeout=120)
    assert_nothing_left(run_dir)


def _below(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def history(run: Run) -> dict[str, Any]:
    """Everything that must repeat: metrics that repeat, batches, samples and answers of evaluations."""
    metrics = [repeatable(json.loads(line)) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in metrics if "policy/loss" in line]
    batches = [read_batch(run.directory / "batches", step - 1) for step in steps]
    answers = {path.name: path.read_text() for path in sorted(run.directory.glob("eval_*.jsonl"))}
    return {"metrics": metrics, "batches": batches, "answers": answers, "samples": samples(run)}


def samples(run: Run) -> list[str]:
    return list(read_lines(run.directory / "samples.jsonl"))


def repeatable(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl or samples.jsonl without what depends on clock, machine or faults."""
    return {name: value for name, value in line.items() if name not in ("wall_time", "file") and repeats(name)}


def repeats(name: str) -> bool:
    return "/" not in name or REGISTRY.lookup(name).reproducible


def assert_same_run(first: Run, second: Run) -> None:
    one, two = history(first), history(second)
    for part in one:
        assert one[part] == two[part], part
    assert differing(first.directory / "hf", second.directory / "hf") == []
    last = CheckpointDirectory(first.directory / "checkpoints").steps()[-1]
    ours, theirs = (run.directory / "checkpoints" / f"iter_{last:07d}" for run in (first, second))
    assert contents_of(ours) == contents_of(theirs)


def contents_of(checkpoint: Path) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Every stored tensor as it lies on the disk (the order there depends on string hashes)."""
    from megarl import platforms

    platforms.activate()  # torch's metadata file holds Megatron-Core's classes
    from torch.distributed.checkpoint import FileSystemReader

    found = {}
    for index, place in FileSystemReader(checkpoint).read_metadata().storage_data.items():
        if index.fqn.startswith("rng_state"):
            continue  # libraries draw from Python's generator when they retry: it depends on time, nothing on it
        with (checkpoint / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            found[index.fqn, tuple(index.offset or ())] = file.read(place.length)
    return found


def check_counters(run: Run, steps: int, groups: int = 4) -> None:
    """In the committed history every group appears once, and the counters are those of an unbroken run."""
    records = run.metrics
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert records[-1]["total/groups_admitted"] == steps * groups
    seen = [tag.group_id for step in range(steps) for tag in read_batch(run.directory / "batches", step).tags]
    assert sorted(set(seen)) == list(range(steps * groups)) and len(seen) == steps * groups * 4


def check_every_group_once(run: Run, steps: int, groups: int = 4, samples: int = 4) -> None:
    """Every step has its number of whole groups, none is in two steps, and the counters add up to them.

    Where generation runs ahead, a finished group may be taken before an older one, so the ids may have gaps.
    """
    records = run.metrics
    taken: set[int] = set()
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for step, record in enumerate(records):
        seen = Counter(tag.group_id for tag in read_batch(run.directory / "batches", step).tags)
        assert list(seen.values()) == [samples] * groups and not seen.keys() & taken
        taken |= seen.keys()
        replaced = record.get("rollout/groups_replaced", 0)
        assert record["groups/trained"] + record["groups/filtered"] == groups + replaced == record["groups/admitted"]
    last = records[-1]
    assert last["total/groups_admitted"] == last["total/groups_trained"] + last["total/groups_filtered"]
    assert last["total/groups_dropped_stale"] == last["total/groups_failed"] == 0
