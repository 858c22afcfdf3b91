"""The shares of the processes, and what an allowance keeps: never more than its bytes, and always the same keys."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.telemetry.event_budget import (
    CONTROLLER,
    DAY_S,
    Allowance,
    WritingProcesses,
    daily_bytes,
    kept_bytes,
    rank_process,
    replica_process,
    spread,
    worker_process,
)
from megarl.telemetry.event_kinds import STREAMS


def names(processes: WritingProcesses) -> list[str]:
    parts = (rank_process, processes.ranks), (replica_process, processes.replicas), (worker_process, processes.workers)
    return [CONTROLLER, *(name(index) for name, count in parts for index in range(count))]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 20))
def test_the_shares_of_all_processes_are_the_whole(ranks: int, replicas: int, workers: int) -> None:
    processes = WritingProcesses(ranks, replicas, workers)
    assert len(names(processes)) == processes.count
    for stream in STREAMS:
        assert sum(processes.share(name, stream) for name in names(processes)) == pytest.approx(1.0)
        assert sum(daily_bytes(10**8, processes, name)[stream] for name in names(processes)) == pytest.approx(
            kept_bytes(10**8, stream)
        )


def test_a_day_writes_less_than_the_budget() -> None:
    assert sum(kept_bytes(200_000_000, stream) for stream in STREAMS) <= 0.85 * 200_000_000 + 3


@given(
    st.lists(st.tuples(st.floats(0, 7200), st.integers(40, 4000), st.integers(0, 10**6)), max_size=300),
    st.floats(1e4, 1e7),
)
def test_no_day_spends_more_than_the_daily_bytes(steps: list[tuple[float, int, int]], daily: float) -> None:
    allowance, now, spent = Allowance(daily, 0.0), 0.0, []
    for wait_s, size, key in steps:
        now += wait_s
        if allowance.keeps(key) and allowance.spend(size, now):
            spent.append((now, size))
    for first, _ in spent:
        assert sum(size for at, size in spent if first <= at < first + DAY_S) <= daily + 1e-3


def test_a_steady_load_settles_where_what_is_kept_is_what_may_be_written() -> None:
    """40 events of 100 bytes per second for a day, with room for a sixteenth of them."""
    daily, now, kept, late = 40 * 100 * DAY_S / 16, 0.0, 0, 0
    allowance = Allowance(daily, now)
    for key in range(int(40 * DAY_S)):
        now = key / 40
        if key % 40 == 0:
            allowance.refill(now)
        if allowance.keeps(key) and allowance.spend(100, now):
            kept += 1
            late += now > DAY_S / 2
    assert 0.8 * daily <= kept * 100 <= daily
    assert late >= 0.35 * kept, "the second half of the day has its part"
    assert allowance.one_in in (16, 32)


def test_what_a_smaller_rate_keeps_a_larger_one_keeps_too() -> None:
    few, many = Allowance(1e6, 0.0), Allowance(1e6, 0.0)
    full = 1e6 / 8
    assert few.spend(int(full * 0.95), 0.0) and many.spend(int(full * 0.7), 0.0)
    assert (few.one_in, many.one_in) == (16, 2)
    kept_few = {key for key in range(5000) if few.keeps(key)}
    kept_many = {key for key in range(5000) if many.keeps(key)}
    assert kept_few < kept_many
    assert len(kept_few) == pytest.approx(5000 / 16, rel=0.1) and len(kept_many) == pytest.approx(2500, rel=0.1)


def test_what_was_used_up_comes_back_with_time() -> None:
    allowance = Allowance(8e5, 0.0)
    assert allowance.spend(100_000, 0.0)
    assert allowance.one_in == 1 << 20 and not allowance.spend(1, 0.0) and not allowance.keeps(7)
    allowance.refill(DAY_S / 4)  # 0.7e6 / 4 of 1e5
    assert allowance.one_in == 1 and allowance.keeps(7)


def test_kept_keys_of_a_sequence_are_evenly_spread() -> None:
    kept = [key for key in range(100_000) if spread(key) < (1 << 64) // 8]
    gaps = [second - first for first, second in itertools.pairwise(kept)]
    assert len(kept) == pytest.approx(12_500, rel=0.01) and max(gaps) <= 16
