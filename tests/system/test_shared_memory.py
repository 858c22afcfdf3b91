"""What trainer and engine that share a GPU hold in each turn: no more than planned, and the same after 20 cycles.

Each counts by its anonymous memory, without what it had before it made its model: that, about half a GiB, is the
interpreter with its libraries. What the trainer has parked is in files without a name, and is counted apart.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.common.values import MIB
from megarl.config.loading.load import config_from_tree
from megarl.config.memory_plan.plan import make_plan
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.run.loop.shared_gpus import SETTLED
from tests.support.runs.run import Run, tiny_config
from tests.support.runs.whole_runs import start_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CYCLES, TENTH = 20, 1.1
# 27 M parameters, 108 MiB in fp32.
MODEL: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048}
GROWN = 16 * MIB  # from the first hand-overs to the last one; a bucket that leaks in each would be 136


def config(directory: Path) -> dict[str, Any]:
    made = tiny_config(directory, steps=CYCLES, **MODEL)
    made["trainer"] |= {"gpus": 1, "optimizer": {"lr": 1e-5}}
    made["rollout"]["share_gpus"] = True
    made["evaluation"]["sets"] = []
    made["weight_sync"] = {"bucket_mb": 8}
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def run(directory: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARED_MEMORY_FILE", str(directory / "memory.jsonl"))
        process = start_run(config(directory), ranks=1, script=("-m", "tests.support.shared_gpus.shared_memory"))
        output, _ = process.communicate(timeout=1500)
    made = Run(process.returncode, output, directory / "run")
    assert made.code == 0, output[-4000:]
    assert len(made.metrics) == CYCLES
    return made


@pytest.fixture(scope="module")
def lines(run: Run, directory: Path) -> list[dict[str, Any]]:
    """Of each turn: what [rank, engine] held at its end, and the most of [rank, engine, both at one time]."""
    found = [json.loads(line) for line in (directory / "memory.jsonl").read_text().splitlines()]
    assert Counter(line["turn"] for line in found) == dict.fromkeys(("train", "publish", "generate"), CYCLES)
    return found


@pytest.fixture(scope="module")
def planned(run: Run, directory: Path) -> SharedMemory:
    shared = make_plan(config_from_tree(config(directory))).shared
    assert shared is not None
    return shared


def test_both_together_hold_no_more_than_the_plan_says(lines: list[dict[str, Any]], planned: SharedMemory) -> None:
    relay = planned.memory.term("relay").bytes  # in a file without a name
    turns = {turn: planned.memory.total(turn) - relay for turn in ("train", "publish", "generate")}
    for line in lines:
        assert line["most"][2] <= TENTH * turns[line["turn"]], line
    assert max(line["most"][0] for line in lines) > 4 * 108 * MIB, "the trainer has weights, gradients and moments"


def test_who_has_let_go_holds_no_more_than_the_plan_says(lines: list[dict[str, Any]], planned: SharedMemory) -> None:
    for line in lines:
        rank, engine = line["end"]
        if line["turn"] == "generate":  # at its end the engine sleeps
            assert rank <= TENTH * planned.parked and engine <= TENTH * planned.asleep, line
        if line["turn"] == "train":
            assert engine <= TENTH * planned.asleep, line
        if line["turn"] == "publish":
            assert rank <= TENTH * planned.parked, line
            assert line["host"] == pytest.approx(planned.host, rel=0.001), "Megatron pads its buffers"


def test_nothing_is_held_after_twenty_cycles_that_was_not_after_the_first(lines: list[dict[str, Any]]) -> None:
    for turn, side in (("generate", 0), ("generate", 1), ("train", 0), ("train", 1)):
        ends = [line["end"][side] for line in lines if line["turn"] == turn]
        assert ends[-1] <= max(ends[:SETTLED]) + GROWN, (turn, side, ends)


def test_the_run_itself_has_measured_it_and_has_no_alarm(run: Run, lines: list[dict[str, Any]]) -> None:
    for side, name in enumerate(("perf/trainer_residue_gib", "perf/engine_residue_gib")):
        asleep = [line["end"][side] for line in lines if line["turn"] == "generate"]
        assert run.metrics[-1][name] * 2**30 == pytest.approx(asleep[-1], abs=GROWN)
    assert "alarm residue" not in run.output
