"""Each bound of each benchmark can be missed: figures beyond it give a row that is not ok, and an exit status of 1."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.report import Ratio, finish
from benchmarks.lib.whole_run import Window
from tests.benchmarks import load_script

MIB = 2**20


def window(tokens_per_s: float, train_s: float = 1.0) -> Window:
    return Window(8, 1.0, tokens_per_s, step_s=1.0 + train_s, wait_s=1.0, train_s=train_s, sync_s=0.0)


def async_vs_sync(ahead: float = 190.0, train_s: float = 1.0, longest: int = 500) -> list[Ratio]:
    windows = {"sync": [window(100.0, train_s)], "async": [window(ahead)]}
    return load_script("async_vs_sync").rows_of(windows, [12] * 90 + [longest] * 10, 16)


def shared_gpus(rate: float = 1.31, kept: float = 1.45, moves_s: float = 0.19, train_s: float = 1.0) -> list[Ratio]:
    script = load_script("shared_gpus")
    windows = [
        Window(4, samples, 100.0, step_s=1.0 + train_s, wait_s=1.0, train_s=train_s, sync_s=0.0)
        for samples in (1.0, rate, kept)
    ]
    return script.rows_of(
        {mode: [script.MeasuredRun(each, moves_s)] for mode, each in zip(script.MODES, windows, strict=True)}, 4
    )


def checkpoint(save: float = 1.9, load: float = 1.9, alongside: float = 1.09, bare: float = 1.0) -> list[Ratio]:
    script = load_script("checkpoint")
    seconds = {
        "write": [1.0], "save": [save], "read": [1.0], "load": [load],
        "update alone": [1.0], "update save": [alongside], "update bare": [bare],
    }  # fmt: skip
    measured = {"seconds": seconds, "bytes": 1, "overlapped": {"save": [1], "bare": [1]}}
    return [*script.disk_rows(measured), script.stall_row(measured)]


def convert(seconds: float = 1.9, moe: float = 1.9, private_gib: float = 1.0) -> list[Ratio]:
    script = load_script("convert")
    model = script.BenchModel("dense", script.info_from_config(script.dense_config(1)), Path("nowhere"))
    private = script.largest_tensor(model.info) + private_gib * 2**30
    speed = {
        name: {"bytes": 1, "seconds": [each], "cp_seconds": [each if name == "moe" else 1.0]}
        for name, each in (("dense", seconds), ("moe", moe))
    }
    return [*script.speed_rows("import", speed)[::2], script.memory_row("import", model, private)]


def load(rate: float, in_flight: float = 10_000.0, cost: float = 0.6, memory: float = 1.0) -> Any:
    measured = load_script("load.control_plane").Measured
    few = measured(1000, 1016.0, 1200.0, {"controller": 0.5}, [{"queue": 1.0}] * 10)
    grown = [{"queue": 1.0}] * 8 + [{"queue": memory}] * 2
    return [few, measured(10_000, in_flight, rate, {"controller": cost}, grown)]


def control_plane(rate: float = 1001.0, **changes: float) -> list[Ratio]:
    return load_script("load.control_plane").rows_of(load(rate, **changes))


def agent_loops(rate: float = 501.0, turn_s: float = 0.09, **changes: float) -> list[Ratio]:
    script, turn = load_script("load.agent_loops"), load_script("load.stand_ins").LongestTurn
    turns = {"controller": turn(1.0, turn_s, 0.03)}
    results = [script.MeasuredAgents(each, turns, turns) for each in load(rate, **changes)]
    return script.rows_of(results)


def trl_additions(sync: float = 4.0, ahead: float = 8.1) -> list[Ratio]:
    result = load_script("trl_race").RaceResult
    trl = {8: result(10.0, 30.0, [0.1], 100.0), 4: result(5.0, 30.0, [0.1], 100.0)}
    runs = (result(each, 30.0, [0.1], 100.0) for each in (sync, ahead))
    return load_script("trl_race").rows_of("additions", trl, *runs)


def trl_long(sync: float = 20.1, ahead: float = 24.0, step_s: float = 30.0, length: float = 100.0) -> list[Ratio]:
    result = load_script("trl_race").RaceResult
    trl = {8: result(10.0, step_s, [0.1], 100.0)}
    runs = (result(sync, 30.0, [0.1], 100.0), result(ahead, 30.0, [0.1], length))
    return load_script("trl_race").rows_of("long", trl, *runs)


def weight_sync(sync: float = 1.3, digest: float = 0.3, engine: int = 228, trainer: int = 286) -> list[Ratio]:
    measured = {
        "seconds": {
            "sync": sync + digest, "sync without digest": sync, "gather": 0.3, "broadcast 64 MiB": 0.2, "load": 0.4
        },
        "bytes": 514 * MIB, "buckets": 8, "bucket_bytes": 64 * MIB, "largest_tensor": 94 * MIB,
        "largest_fused": 18 * MIB, "memory": {"engine, in place": engine * MIB, "trainer rank 0": trainer * MIB},
    }  # fmt: skip
    return load_script("weight_sync").make_rows(measured)


def delta_rule(even: float = 1.01, long: float = 1.81) -> list[Ratio]:
    ratios = {"8 x 256": even, "1 x 2048": long, "ragged": 1.0}
    return load_script("delta_rule").rows_of({name: {"ours": [1.0], "theirs": [each]} for name, each in ratios.items()})


def router_replay(replayed: float = 1.04, payload: float = 1.04) -> list[Ratio]:
    script = load_script("router_replay")
    seconds = {side: {part: [each] for part in script.PARTS} for side, each in ((True, replayed), (False, 1.0))}
    return script.rows_of(seconds, payload)


# What makes the rows, and changes that are beyond a bound, with a part of the name of the row that must tell it.
CASES: dict[Callable[..., list[Ratio]], list[tuple[dict[str, Any], str]]] = {
    async_vs_sync: [
        ({"ahead": 150.0}, "async / sync"), ({"ahead": 170.0}, "async / possible"), ({"train_s": 1.5}, "balance"),
        ({"longest": 100}, "tail"),
    ],
    shared_gpus: [
        ({"rate": 1.29, "kept": 1.4}, "shared / separate"), ({"kept": 1.46}, "shared / kept"),
        ({"moves_s": 0.21}, "hand-overs"), ({"train_s": 1.4}, "balance"),
    ],
    checkpoint: [
        ({"save": 2.1}, "checkpoint_save"), ({"load": 2.1}, "checkpoint_load"),
        ({"alongside": 1.11}, "checkpoint_stall"),
        ({"alongside": 1.25, "bare": 1.2}, "checkpoint_stall"),
    ],
    convert: [
        ({"seconds": 2.1}, "dense_import"), ({"moe": 3.0}, "per_byte of dense"),
        ({"private_gib": 1.6}, "dense_import_memory"),
    ],
    delta_rule: [({"even": 0.99}, "8 x 256"), ({"long": 1.79}, "1 x 2048")],
    router_replay: [({"replayed": 1.06}, "step"), ({"payload": 1.06}, "payload")],
    control_plane: [
        ({"rate": 999.0}, "rate"), ({"in_flight": 9999.0}, "in flight"), ({"cost": 0.7}, "cost"),
        ({"memory": 1.06}, "memory"),
    ],
    agent_loops: [
        ({"rate": 499.0}, "rate"), ({"in_flight": 9999.0}, "in flight"), ({"cost": 0.7}, "cost"),
        ({"turn_s": 0.11}, "longest turn / "),
    ],
    trl_additions: [({"ahead": 7.9}, "async / TRL")],
    trl_long: [
        ({"sync": 19.9}, "sync / TRL"), ({"ahead": 23.0}, "async / sync"), ({"step_s": 61.0}, "TRL's step"),
        ({"length": 126.0}, "longest / shortest"),
    ],
    weight_sync: [
        ({"sync": 1.36}, "weight_sync_time"), ({"digest": 0.4}, "digest_cost"), ({"engine": 229}, "engine, in place"),
        ({"trainer": 287}, "trainer rank 0"),
    ],
}  # fmt: skip


def cases() -> Iterator[Any]:
    for make, changes in CASES.items():
        for number, (beyond, row) in enumerate(changes):
            yield pytest.param(make, beyond, row, id=f"{make.__name__}-{number}")


QUIET = argparse.Namespace(json=None, quick=False)


@pytest.mark.parametrize(("make", "beyond", "row"), cases())
def test_a_figure_beyond_a_bound_misses_it(
    make: Callable[..., list[Ratio]], beyond: dict[str, Any], row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make(), make(**beyond)
    assert finish(good, QUIET) == 0, capsys.readouterr().out
    assert any(row in each.name for each in bad if not each.ok), [each.name for each in bad if not each.ok]
    assert finish(bad, QUIET) == 1


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_every_bound_has_a_figure_beyond_it(make: Callable[..., list[Ratio]]) -> None:
    missed = {each.name for beyond, _ in CASES[make] for each in make(**beyond) if not each.ok}
    again = {"seed 1", "moe_import"}  # the same bound for another seed, another model
    assert [
        each.name for each in make()
        if each.bound is not None and each.name not in missed and not any(part in each.name for part in again)
    ] == []  # fmt: skip
