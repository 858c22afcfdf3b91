"""The pool against functions that really hang, crash and raise."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.process import RewardProcess
from megarl.rewards.types import RewardInput, RewardResult, RewardSpec
from megarl.rewards.worker_pool import MAX_NOT_TAKEN, RewardPool, RewardPoolError
from tests.support.checkout import ROOT
from tests.support.rewards.reward_pool import make_reward_pool, score_all, worker_pids

MODULE = "tests.support.rewards.reward_functions"
FUNCTION = f"{MODULE}:by_response"
TIMEOUT_S = 2.0


def sample(response: str) -> RewardInput:
    return RewardInput(prompt="", response=response)


def run(pool: RewardPool, *responses: str, within_s: float = 240.0) -> list[RewardResult]:
    return score_all(pool, [sample(r) for r in responses], within_s)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False
    return state != "Z"


def gone(pids: list[int], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pool = make_reward_pool(FUNCTION, workers=2, timeout_s=TIMEOUT_S, on_error=-0.5)
    asyncio.run(pool.start())
    yield pool
    pids = worker_pids(pool)
    pool.close()
    assert gone(pids)


@pytest.mark.parametrize(
    ("response", "reason", "message"),
    [
        ("hang", "timeout", "no reward after 2 s"),
        ("hang_in_c", "timeout", "no reward after 2 s"),  # no signal could interrupt this one
        ("raise apples", "exception", "KeyError: 'no apples' (reward_functions.py:"),
        ("exit", "exception", "SystemExit: 3"),
        ("crash", "crash", "exit code 7"),
        ("abort", "crash", "killed by SIGABRT"),
        ("nan", "invalid", "nan, not a finite number"),
        ("none", "invalid", "a number or a RewardResult, not None"),
    ],
)
def test_it_costs_that_sample_its_reward_and_no_other(
    pool: RewardPool, response: str, reason: str, message: str
) -> None:
    outcomes = run(pool, "ok 0.25", response, "ok 0.5", "ok 0.75")
    assert [o.score for o in outcomes] == [0.25, -0.5, 0.5, 0.75]
    assert [o.error is None for o in outcomes] == [True, False, True, True]
    assert outcomes[1].reason == reason and message in str(outcomes[1].error)


@pytest.mark.slow
def test_what_a_hanging_function_started_goes_with_it(pool: RewardPool, tmp_path: Path) -> None:
    assert run(pool, f"spawn {tmp_path / 'pid'}")[0].reason == "timeout"
    assert gone([int((tmp_path / "pid").read_text())])


def test_a_hang_holds_up_nobody_on_the_other_worker(pool: RewardPool) -> None:
    async def race() -> None:
        hanging = asyncio.create_task(pool.score(sample("hang")))
        await asyncio.sleep(0.05)
        await pool.score(sample("ok"))
        assert not hanging.done()
        assert (await hanging).reason == "timeout"

    run(pool, "ok", "ok")  # both workers are there again
    asyncio.run(race())


@pytest.mark.slow
def test_samples_after_a_hang_in_the_same_batch_are_still_judged() -> None:
    """One worker, batches of many: the hanging one is found among them, the rest goes to the replacement."""
    with contextlib.closing(make_reward_pool(FUNCTION, workers=1, timeout_s=TIMEOUT_S)) as pool:
        pool._sample_seconds = 1e-4  # as after many cheap samples
        outcomes = run(pool, *(["ok 1"] * 10), "hang", *(["ok 2"] * 10), "crash", *(["ok 3"] * 10))
        assert [o.score for o in outcomes] == [1.0] * 10 + [0.0] + [2.0] * 10 + [0.0] + [3.0] * 10
        assert Counter(o.reason for o in outcomes) == {None: 30, "timeout": 1, "crash": 1}


@pytest.mark.slow
def test_the_limit_is_per_sample_not_per_batch() -> None:
    with contextlib.closing(make_reward_pool(FUNCTION, workers=1, timeout_s=3.0)) as pool:
        pool._sample_seconds = 1e-4
        assert [o.score for o in run(pool, *["sleep 0.3"] * 12)] == [1.0] * 12


@pytest.mark.slow
def test_warm_up_does_not_count_as_a_samples_time() -> None:
    pool = make_reward_pool(f"{MODULE}:warmed", timeout_s=1.0)  # it warms up for 1.5 s
    try:
        assert run(pool, "x")[0].error is None  # started by the first sample, not by start()
    finally:
        pool.close()


@pytest.mark.slow
def test_it_works_from_a_thread_that_is_not_the_main_one(pool: RewardPool) -> None:
    """Ray's async actors run in such threads, in which no signal can be used."""
    results: list[RewardResult] = []
    thread = threading.Thread(target=lambda: results.extend(run(pool, "ok 1", "hang", "ok 2")))
    thread.start()
    thread.join(timeout=240)
    assert [r.score for r in results] == [1.0, -0.5, 2.0]


def test_a_killed_worker_is_replaced(pool: RewardPool) -> None:
    run(pool, "ok", "ok")
    before = worker_pids(pool)
    for pid in before:
        with contextlib.suppress(ProcessLookupError):  # one that the test before had killed, not yet replaced
            os.kill(pid, signal.SIGKILL)
    assert gone(before)
    # Found dead when a batch is sent, which is no sample's fault.
    assert [o.score for o in run(pool, *["ok 1"] * 6)] == [1.0] * 6
    assert run(pool, *["ok 1"] * 40)[0].error is None


def test_a_stopped_worker_is_waited_for_no_longer_than_for_a_reward() -> None:
    with contextlib.closing(RewardProcess([RewardSpec(FUNCTION)], 120.0)) as process:
        process.wait_ready()
        os.kill(process._child.pid, signal.SIGSTOP)
        assert "did not take its samples within 0.2 s" in process.send([(1, bytes(1 << 24))], 0.2)


class EndsWhenSent:
    """A process that is ready, and ends as soon as it is sent samples."""

    started = 0

    def __init__(self, *args: object) -> None:
        type(self).started += 1

    def wait_ready(self) -> None:
        pass

    def send(self, batch: object, timeout_s: float) -> str:
        return "exit code 9"

    def kill(self) -> None:
        pass

    close = kill


def test_a_process_that_ends_whenever_it_is_sent_samples_is_not_replaced_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megarl.rewards.worker_pool.RewardProcess", EndsWhenSent)
    with contextlib.closing(make_reward_pool(FUNCTION, workers=1)) as pool:
        pool._sample_seconds = 1e-4
        for outcome in run(pool, "ok", "ok"):
            assert outcome.reason == "crash" and str(outcome.error).endswith("the latest: exit code 9")
        assert EndsWhenSent.started <= 2 * MAX_NOT_TAKEN + 1


def test_an_error_in_the_pool_itself_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything was sent."""
    with contextlib.closing(make_reward_pool(FUNCTION, workers=1)) as pool:
        asyncio.run(pool.start())
        monkeypatch.setattr(pool, "_run", lambda *of: 1 / 0)
        with pytest.raises(RewardPoolError, match="ZeroDivisionError"):
            run(pool, "ok", "ok")


def test_an_abandoned_sample_is_not_judged() -> None:
    pool = make_reward_pool(FUNCTION, workers=1, timeout_s=600.0)

    async def abandon() -> None:
        await pool.start()
        busy = asyncio.create_task(pool.score(sample("sleep 0.5")))
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(pool.score(sample("hang")))
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await busy).score == 1.0
        async with asyncio.timeout(60):  # the only worker does not hang before this sample
            assert (await pool.score(sample("ok"))).score == 1.0

    try:
        asyncio.run(abandon())
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("gsm9k", {}, "neither code, gsm8k, math nor a path `package.module:function`"),
        ("no.such.module:f", {}, "'no.such.module:f' cannot be imported: ModuleNotFoundError"),
        (f"{MODULE}:nothing", {}, "has no attribute 'nothing'"),
        (f"{MODULE}:three", {}, "needs (a, b, c)"),
        (f"{MODULE}:coroutine", {}, "is async"),
        (f"{MODULE}:plain", {"scale": 2}, "['scale'] are not parameters"),
    ],
)
def test_a_function_that_cannot_work_is_found_at_the_start(function: str, kwargs: dict, message: str) -> None:
    with contextlib.closing(make_reward_pool(function, kwargs, workers=1)) as pool:
        with pytest.raises(ValueError) as caught:
            asyncio.run(pool.start())
        assert message in str(caught.value)
        with pytest.raises(RewardPoolError):
            run(pool, "ok")


def test_what_another_process_cannot_receive_is_found_at_once() -> None:
    with pytest.raises(ValueError, match=r"reward\.kwargs cannot be sent"):
        make_reward_pool(FUNCTION, {"lock": threading.Lock()})
    with pytest.raises(ValueError, match="workers >= 1"):
        make_reward_pool(FUNCTION, workers=0)


@pytest.mark.slow
def test_a_pool_that_cannot_replace_its_process_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not silently give `on_error` for every sample."""
    monkeypatch.setenv("MEGARL_TEST_MARKER", str(tmp_path / "started"))
    pool = make_reward_pool(f"{MODULE}:starts_once", workers=1)

    async def score() -> list[object]:
        await pool.start()
        return await asyncio.gather(*(pool.score(sample("x")) for _ in range(3)), return_exceptions=True)

    try:
        outcomes = asyncio.run(score())
        assert all(isinstance(o, RewardPoolError) and "could not be replaced" in str(o) for o in outcomes)
        assert "FileExistsError" in str(outcomes[0])
    finally:
        pool.close()


@pytest.mark.slow
def test_close_fails_what_waits_and_can_be_repeated() -> None:
    pool = make_reward_pool(FUNCTION, workers=1, timeout_s=60.0)
    asyncio.run(pool.start())
    futures = [pool.submit(sample("hang")), pool.submit(sample("ok"))]
    time.sleep(0.2)
    pids = worker_pids(pool)
    pool.close()
    pool.close()
    assert gone(pids)
    for future in futures:
        with pytest.raises(RewardPoolError, match="closed"):
            future.result(timeout=5)
    with pytest.raises(RewardPoolError, match="closed"):
        run(pool, "ok")


@pytest.mark.slow
def test_workers_die_with_a_killed_parent() -> None:
    code = (
        "import asyncio; from tests.support.rewards.reward_pool import make_reward_pool, worker_pids\n"
        "from megarl.rewards.types import RewardInput\n"
        f"pool = make_reward_pool({FUNCTION!r}, workers=2, timeout_s=600)\n"
        "asyncio.run(pool.start())\n"
        "futures = [pool.submit(RewardInput('', r)) for r in ('hang_in_c', 'hang')]\n"
        "print(*worker_pids(pool), flush=True)\n"
        "futures[0].result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    parent.kill()
    parent.wait(timeout=60)
    assert gone(pids)


def test_one_pool_runs_the_functions_of_several_sets() -> None:
    """Each with arguments of its own, in the same processes; a mistake names the set."""
    options: dict[str, Any] = {"workers": 1, "timeout_s": 60.0, "on_error": 0.0, "start_timeout_s": 120.0}
    some = {"weight": 3.0}
    pool = RewardPool([RewardSpec(f"{MODULE}:plain"), RewardSpec(f"{MODULE}:some_fields", some, "data.sets.1.reward"),
                       RewardSpec("gsm8k")], **options)  # fmt: skip

    async def score() -> list[float]:
        judged = RewardInput("", "72", answer="72", row={"k": 1}, finish_reason="length")
        scores = [(await pool.score(judged, function)).score for function in (0, 1, 2)]
        return [*scores, (await pool.score(replace(judged, answer="A"), 1)).score]

    try:
        assert asyncio.run(score()) == [1.0, 0.0, 1.0, 3.0] and len(worker_pids(pool)) == 1
    finally:
        pool.close()
    with contextlib.closing(
        RewardPool([RewardSpec("gsm8k"), RewardSpec(f"{MODULE}:nothing", {}, "data.sets.1.reward")], **options)
    ) as broken:
        with pytest.raises(ValueError, match=r"data\.sets\.1\.reward: reward\.function .* has no attribute 'nothing'"):
            asyncio.run(broken.start())
