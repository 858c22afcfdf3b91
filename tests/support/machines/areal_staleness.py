"""The answers of AReaL's `StalenessManager` to the events of small runs, and those runs.

The answers of areal 1.0.4 are recorded in `excerpts/areal_staleness.json`. It is asked again in
`make test-oracles` and wherever the package can be found; to record them again:

    tools/oracles.sh .oracles && MEGARL_ORACLES=.oracles python -m tests.support.machines.areal_staleness

Its class is executed from its own file, because the package imports much that a count of rollouts does not need.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from megarl.config.derived.staleness import Pace
from tests.support.checkout import EXCERPTS
from tests.support.losses.oracles import VARIABLE

RECORD = EXCERPTS / "areal_staleness.json"
NO_LIMIT = 10**6


@dataclass(frozen=True)
class CapacityRun:
    """Events of a run, and the capacity that AReaL reports after each.

    Events: `submit N` rollouts, `accept` or `reject` one (the oldest that runs), `train` one batch, `version N` is
    served (in trained batches), `resume` from a checkpoint of the moment. `pace`: the fields of ours.
    """

    groups: int
    pace: dict[str, int]
    events: list[str]
    capacities: list[int]


def recorded_runs() -> list[CapacityRun]:
    return [CapacityRun(**run) for run in json.loads(RECORD.read_text())["runs"]]


def areal_directory() -> Path | None:
    """The directory of the package `areal` that `make test-oracles` or its user has installed; it is not imported."""
    if directory := os.environ.get(VARIABLE):
        return Path(directory) / "areal"
    spec = importlib.util.find_spec("areal")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def staleness_manager(areal: Path) -> Any:
    """AReaL's class, joined to its own dataclass of counts."""
    tree = ast.parse((areal / "api" / "io_struct.py").read_text())
    counts = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RolloutStat")
    scope: dict[str, Any] = {"dataclass": dataclass}
    exec(compile(ast.Module([counts], []), "io_struct.py", "exec"), scope)
    api = ModuleType("areal.api")
    api.RolloutStat = scope["RolloutStat"]  # type: ignore[attr-defined]
    module: dict[str, Any] = {"__name__": "areal_staleness_manager"}
    source = (areal / "infra" / "staleness_manager.py").read_text()
    with mock.patch.dict(sys.modules, {"areal": ModuleType("areal"), "areal.api": api}):
        exec(compile(source, "staleness_manager.py", "exec"), module)
    return module["StalenessManager"]


def capacities(kind: Any, run: CapacityRun) -> list[int]:
    """AReaL's capacity after each event of a run. Its staleness counts batches, ours updates."""
    pace = Pace(**run.pace)
    staleness = (pace.max_staleness + 1) // pace.updates_per_step - 1
    served = SimpleNamespace(version=0)
    served.get_version = lambda: served.version
    manager = kind(served, NO_LIMIT, run.groups, staleness)
    answers = []
    for event in run.events:
        name, _, number = event.partition(" ")
        if name == "submit":
            for _ in range(int(number)):
                manager.on_rollout_enqueued()
                manager.on_rollout_submitted()
        elif name == "accept":
            manager.on_rollout_accepted()
        elif name == "reject":
            manager.on_rollout_rejected()
        elif name == "version":
            served.version = int(number)
        elif name == "resume":
            manager = kind(served, NO_LIMIT, run.groups, staleness)
            manager.on_version_recovered(served.version)
        answers.append(manager.get_capacity())
    return answers


def _events(groups: int, pace: Pace, seed: int) -> Iterator[str]:
    """Yield random events; groups finish in the order in which they started, so that no step waits for one."""
    rng = random.Random(seed)
    running = queued = trained = started = rejected = 0
    batches_ahead = (pace.max_staleness + 1) // pace.updates_per_step
    version = 0  # in trained batches
    for _ in range(60):
        possible = ["submit"] + ["accept", "accept", "reject"] * (running > 0) + ["train"] * 2 * (queued >= groups)
        chosen = rng.choice(possible)
        if chosen == "submit":
            room = (version + batches_ahead) * groups - (started - rejected)
            number = rng.randint(0, room)
            running, started = running + number, started + number
            yield f"submit {number}"
            continue
        yield chosen
        if chosen == "train":
            queued, trained = queued - groups, trained + 1
            if pace.publishes_after(trained):
                version = trained
                yield f"version {version}"
        else:
            running -= 1
            queued, rejected = queued + (chosen == "accept"), rejected + (chosen == "reject")
    if pace.sync_interval == 1:
        yield "resume"
        yield f"submit {batches_ahead * groups}"


PACES = [
    Pace(),
    Pace(max_staleness=1),
    Pace(max_staleness=4),
    Pace(sync_interval=3, max_staleness=4),
    Pace(updates_per_step=2, sync_interval=2, max_staleness=5),
    Pace(updates_per_step=2, sync_interval=4, max_staleness=4),
]


def record() -> None:
    """Write the answers of the installed areal."""
    areal = areal_directory()
    if areal is None:
        raise SystemExit("no package areal; see this module's docstring")
    kind = staleness_manager(areal)
    runs = []
    for seed, pace in enumerate(PACES):
        run = CapacityRun(2 + seed % 3, asdict(pace), list(_events(2 + seed % 3, pace, seed)), [])
        runs.append(asdict(run) | {"capacities": capacities(kind, run)})
    origin = "capacities: areal 1.0.4 (Apache-2.0), areal/infra/staleness_manager.py, by tests/support/machines/areal_staleness.py"  # noqa: E501
    lines = ",\n".join(json.dumps(run) for run in runs)
    RECORD.write_text(f'{{"origin": {json.dumps(origin)}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    record()
