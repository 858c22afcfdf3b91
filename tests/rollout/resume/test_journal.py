"""A controller that is killed, and the next one: groups are used again, each once, and only where they fit."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import RolloutError
from megarl.queue.trajectory import MISSING_LOGPROB, Trajectory, VersionSpan
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec, continuation_seed
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import CallRecord, FrozenLoop, GroupProgress, UnfinishedGroup
from megarl.rollout.resume.journal import GROUPS_AT_ONCE, JOURNAL_FILE, identity
from megarl.rollout.resume.journal_file import JournalFile
from megarl.rollout.resume.journal_records import (
    EpochRecord,
    decode_group,
    decode_unfinished,
    encode_unfinished,
    read_head,
)
from megarl.rollout.resume.kept_groups import History, KeptGroups
from megarl.rollout.resume.lineage import INITIAL
from tests.support.agents.retokenized import Retokenized
from tests.support.rollout.fake_rollout import (
    FakeSource,
    LocalController,
    journalled,
    local_controller,
    numbered_routes,
)
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
WAIT_S = 5.0
PROMPT = FakeSource().draw(0)


def controller(
    directory: Path, monkeypatch: pytest.MonkeyPatch, loop: AgentLoop | None = None, **sections: Any
) -> LocalController:
    settings = {
        "batch": {"groups": GROUPS, "samples_per_group": SAMPLES},
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": 1},
        "rollout": {"journal_s": 0.01},
    }
    return local_controller(config_of("model", **settings | sections), directory, monkeypatch, loop)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def first_attempt(local: LocalController, directory: Path) -> tuple[Any, dict[str, Trajectory]]:
    """A checkpoint after one step; group 4 is unfinished and the others of the bound are finished when it is killed."""
    local.fleet.held = {4}
    await local.controller.begin(None)
    await local.controller.set_version(0)
    await local.controller.wait_batch(0, WAIT_S)
    await local.controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0)
    state = json.loads(json.dumps(await local.controller.state_dict()))
    await local.controller.set_version(1)  # starts groups 6, 7 and 8
    await until(lambda: journalled(directory) == [0, 1, 2, 3, 5, 6, 7, 8])
    journal = local.controller._journal
    await until(lambda: not journal._pending)  # a write that is cancelled at its very end would be made again
    rows = dict(local.queue.rows)
    await local.controller.shutdown()
    return state, rows


async def second_attempt(local: LocalController, state: Any) -> dict[int, list[Trajectory]]:
    """Take the batches of two steps; the groups of them."""
    await local.controller.begin(state)
    counters = await local.controller.set_version(1)
    assert counters.balanced and counters.rolled_back >= 0
    taken: dict[int, list[Trajectory]] = {}
    for step in (1, 2):
        batch = await local.controller.wait_batch(step, WAIT_S)
        for key in batch.keys:
            row = local.queue.rows[key]
            taken.setdefault(row.group_id, []).append(row)
        await local.controller.commit(step, trained=3, filtered=0, dropped_stale=0, failed=0)
    await local.controller.shutdown()
    return taken


@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("loop", [SingleTurn(), Retokenized()], ids=lambda loop: type(loop).__name__)
async def test_finished_groups_are_used_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: AgentLoop, survives: bool
) -> None:
    """The kill ends the controller too, or only the trainer. A marked token tells old rows from those drawn again."""
    batch = {"groups": GROUPS, "samples_per_group": 3}  # two of which are good in any case
    first = controller(tmp_path, monkeypatch, loop, batch=batch)
    state, rows = await first_attempt(first, tmp_path)
    assert {row.group_id for row in rows.values()} == {3, 5, 6, 7, 8}
    second = first if survives else controller(tmp_path, monkeypatch, loop, batch=batch)
    second.fleet.held = set()
    asked: list[Any] = []
    generate = second.fleet.generate

    async def watched(context: RequestContext, requests: Any, **options: Any) -> Any:
        asked.append(context.prefix)
        return await generate(context, requests, **options)

    second.fleet.generate = watched  # type: ignore[method-assign]
    taken = await second_attempt(second, state)
    assert sorted(taken) == [3, 4, 5, 6, 7, 8]
    for group, own in taken.items():
        if group != 4:
            assert own == [row for row in rows.values() if row.group_id == group]
    assert 4 in asked and not {3, 5, 6, 7, 8} & set(asked)


async def saved(local: LocalController) -> None:
    """Report the checkpoint of one step to a controller whose tasks have ended; its journal keeps up again."""
    await local.controller.saved(1)
    journal = local.controller._journal
    local.controller._tasks.start(journal.keep_up(local.controller._groups.history, {}))


async def test_the_journal_of_an_attempt_that_was_set_aside_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank died before the first checkpoint: the results are moved, and the surviving controller starts again."""
    local = controller(tmp_path, monkeypatch)
    await first_attempt(local, tmp_path)
    (tmp_path / JOURNAL_FILE).rename(tmp_path / "moved")
    local.fleet.held = set()
    await local.controller.begin(None)
    assert not (tmp_path / JOURNAL_FILE).exists()
    counters = await local.controller.set_version(0)
    assert counters.ready == 0 and counters.balanced
    await local.controller.wait_batch(0, WAIT_S)
    await until(lambda: {0, 1, 2} <= set(journalled(tmp_path)))
    await local.controller.shutdown()


@pytest.mark.parametrize("place", ["candidates", "write"])
async def test_a_trainer_that_has_gone_uses_no_group_of_the_history_that_the_next_one_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its `set_version` still waits for the disk when the next trainer begins."""
    state, _ = await first_attempt(controller(tmp_path, monkeypatch), tmp_path)
    local = controller(tmp_path, monkeypatch)
    local.fleet.held = set()
    await local.controller.begin(state)
    journal, go, calls = local.controller._journal, asyncio.Event(), []
    on_disk = getattr(journal, place)

    async def slow_at_first(*arguments: Any) -> Any:
        calls.append(place)
        if len(calls) == 1:
            await go.wait()
        return await on_disk(*arguments)

    monkeypatch.setattr(journal, place, slow_at_first)
    old = asyncio.create_task(local.controller.set_version(1))
    await until(lambda: len(calls) == 1)
    await local.controller.begin(state)
    go.set()
    with pytest.raises(RolloutError, match=r"kept groups .* was given up: another trainer has begun"):
        await old
    await asyncio.sleep(0.05)
    assert (await local.controller.counters()).in_flight == 0 and local.queue.rows == {}
    assert sorted(await second_attempt(local, state)) == [3, 4, 5, 6, 7, 8]


def _is_unfinished(record: bytes, group: int) -> bool:
    head = read_head(record)
    return head["kind"] == "unfinished" and head["group"] == group


def unfinished(directory: Path) -> list[int]:
    heads = [read_head(record) for record in JournalFile(directory / JOURNAL_FILE).read()]
    return [head["group"] for head in heads if head["kind"] == "unfinished"]


@pytest.mark.parametrize("survives", [False, True])
async def test_an_unfinished_group_goes_on_from_the_tokens_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: bool
) -> None:
    """Group 4 has one token of its first response, of version 0; the rest is made with version 1."""
    first = controller(tmp_path, monkeypatch)
    first.fleet.reports, first.fleet.routes = 1, True
    state, _ = await first_attempt(first, tmp_path)
    await asyncio.sleep(0.1)
    assert unfinished(tmp_path).count(4) == 1, "it was written again although it had not grown"
    second = first if survives else controller(tmp_path, monkeypatch)
    second.fleet.held, second.fleet.routes = set(), True
    before = {request.request_id[-3:]: request for request in first.fleet.sent[4]}
    second.fleet.sent.clear()
    taken = await second_attempt(second, state)
    assert sorted(taken) == [3, 4, 5, 6, 7, 8] and list(second.fleet.sent) == [4]
    begun, fresh = second.fleet.sent[4]
    assert begun.prompt_ids == [*before["0-0"].prompt_ids, 8]
    assert (begun.routes_from, fresh.routes_from) == (5, 0), "the experts of the 5 tokens that it has read are kept"
    assert begun.sampling.max_tokens == before["0-0"].sampling.max_tokens - 1
    assert before["0-0"].seed is not None and begun.seed == continuation_seed(before["0-0"].seed, 1)
    assert (fresh.prompt_ids, fresh.seed) == (before["1-0"].prompt_ids, before["1-0"].seed)
    continued, drawn = sorted(taken[4], key=lambda row: row.sample_index)
    assert continued.response_ids == [8] + [9] * 6 and continued.rollout_logprobs == [-0.25] + [-0.5] * 6
    assert continued.versions == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 7))
    assert (continued.routes, drawn.routes) == (numbered_routes(0, 11), numbered_routes(0, 9))
    assert drawn.response_ids == [9] * 5 and drawn.versions == (VersionSpan(1, 0, 5),)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, MISSING_LOGPROB])
async def test_an_unfinished_group_is_drawn_again_if_a_log_prob_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    """It would fail again after every start, whatever the engines add to it."""
    first = controller(tmp_path, monkeypatch)
    first.fleet.reports = 1
    state, _ = await first_attempt(first, tmp_path)
    file = JournalFile(tmp_path / JOURNAL_FILE)
    record = [each for each in file.read() if _is_unfinished(each, 4)][-1]
    begun = decode_unfinished(record)
    [(place, response)] = begun.responses.items()
    damaged = replace(response, tokens=replace(response.tokens, logprobs=[bad]))
    problem = read_head(record)["problem"]
    file.append([encode_unfinished(4, replace(begun, responses={place: damaged}), problem)])
    second = controller(tmp_path, monkeypatch)
    taken = await second_attempt(second, state)
    assert [each.prompt_ids for each in second.fleet.sent[4]] == [[5] * 5] * SAMPLES, "nothing is continued"
    assert list(second.fleet.sent) == [4] and {row.status for rows in taken.values() for row in rows} == {"ok"}
    assert "1 kept groups are drawn again: they have non-finite log-probs" in caplog.text


async def test_what_a_surviving_controller_has_cancelled_goes_on_although_it_was_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = controller(tmp_path, monkeypatch, rollout={"journal_s": 60.0})
    local.fleet.held, local.fleet.reports = {4}, SAMPLES
    await local.controller.begin(None)
    await local.controller.set_version(0)
    await local.controller.wait_batch(0, WAIT_S)
    assert not (tmp_path / JOURNAL_FILE).read_bytes().count(b"unfinished")
    local.fleet.held, before = set(), local.fleet.sent.pop(4)
    await local.controller.begin(None)
    await local.controller.set_version(0)
    await until(lambda: 4 in local.fleet.sent)
    assert [each.prompt_ids for each in local.fleet.sent[4]] == [[*each.prompt_ids, 8] for each in before]
    await local.controller.shutdown()


async def test_of_unfinished_groups_only_the_last_record_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = controller(tmp_path, monkeypatch)
    local.fleet.reports = 1
    await first_attempt(local, tmp_path)
    file = JournalFile(tmp_path / JOURNAL_FILE)
    # Other groups may have been written while they were judged.
    *_, record = [each for each in file.read() if _is_unfinished(each, 4)]
    begun = decode_unfinished(record)
    file.append([encode_unfinished(4, begun, problem) for problem in ("the second", "the third")])
    await saved(local)
    await until(lambda: unfinished(tmp_path) == [4] and journalled(tmp_path) == [3, 5, 6, 7, 8])
    [last] = [each for each in file.read() if _is_unfinished(each, 4)]
    assert read_head(last)["problem"] == "the third" and decode_unfinished(last) == begun


async def test_settled_groups_leave_the_journal_when_a_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = controller(tmp_path, monkeypatch)
    await first_attempt(local, tmp_path)
    await asyncio.sleep(0.1)
    assert journalled(tmp_path) == [0, 1, 2, 3, 5, 6, 7, 8]
    await saved(local)
    await until(lambda: journalled(tmp_path) == [3, 5, 6, 7, 8])


async def test_groups_of_lost_updates_are_marked_and_drawn_again_if_they_are_too_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back to the beginning: tokens of version 1 have one lost update. Step 0 may train them, and step 1 no more."""
    await first_attempt(controller(tmp_path, monkeypatch), tmp_path)
    local = controller(tmp_path, monkeypatch)
    await local.controller.begin(None)
    await local.controller.set_version(0)
    batch = await local.controller.wait_batch(0, WAIT_S)
    rows = [local.queue.rows[key] for key in batch.keys]
    spans = {(row.group_id, span.version, span.lost, span.epoch) for row in rows for span in row.versions}
    assert spans == {(6, 1, 1, 0), (7, 1, 1, 0), (8, 1, 1, 0)} and {row.oldest_version for row in rows} == {-1}
    assert batch.timings["rollout/groups_kept"] >= 3
    await local.controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0)
    await local.controller.set_version(1)
    assert (await local.controller.wait_batch(1, WAIT_S)).counters.balanced
    await local.controller.shutdown()


@pytest.mark.parametrize("changed", ["sampling", "prompt", "lineage", "off"])
async def test_what_changed_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    sections: dict[str, Any] = {
        "sampling": {"sampling": {"max_tokens": 8, "temperature": 0.5}},
        "off": {"rollout": {"journal_s": 0.0}},
    }.get(changed, {})
    state, _ = await first_attempt(controller(tmp_path, monkeypatch), tmp_path)
    local = controller(tmp_path, monkeypatch, **sections)
    if changed == "prompt":
        monkeypatch.setattr(local.controller._source, "reference", lambda group: "another answer")
    if changed == "lineage":  # the checkpoint of another run
        state["lineage"] = [[0, "another", 0]]
    asked: set[Any] = set()
    generate = local.fleet.generate

    async def watched(context: RequestContext, requests: Any, **options: Any) -> Any:
        asked.add(context.prefix)
        return await generate(context, requests, **options)

    local.fleet.generate = watched  # type: ignore[method-assign]
    taken = await second_attempt(local, state)
    assert sorted(taken) == [3, 4, 5, 6, 7, 8] and asked >= set(taken)


def test_settings_have_the_digests_that_a_journal_of_b761bc2e_has_for_them() -> None:
    """Else every group in it would be drawn again, although nothing has changed for the user."""
    found = identity(config_of("model"))
    assert found["agent"] == "32980137e9f777d978984ce5a372179e"
    assert found["sampling"] == "949d49bb8d06de6d0e339e6d926876d2"
    assert found["data"] == "b4488d9ae782ecee70f36052850c4d1d"
    assert found["reward"] == "2ad76e4fff400f36dfe9df56faee902d"
    changed = identity(config_of("model", sampling__temperature=0.5))
    assert changed != found and changed | {"sampling": found["sampling"]} == found
    replaying = identity(config_of("model", trainer__router_replay="r3"))  # groups of other runs have no experts
    assert replaying.keys() - found.keys() == {"trainer.router_replay"} and found.items() <= replaying.items()


async def test_a_journal_that_cannot_be_read_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JournalFile(tmp_path / JOURNAL_FILE).append([b"\x02\x00\x00\x00{}"])
    await first_attempt(controller(tmp_path, monkeypatch), tmp_path)
    records = JournalFile(tmp_path / JOURNAL_FILE).read()
    kinds = [read_head(record)["kind"] for record in records]  # on a busy machine an unfinished group comes first
    assert kinds[0] == "epoch" and decode_group(records[kinds.index("group")])


async def test_a_group_is_on_the_disk_when_persist_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal itself would write a minute later. Several that wait at once share a write."""
    local = controller(tmp_path, monkeypatch, rollout={"journal_s": 60.0})
    local.fleet.held = set(range(9))
    await local.controller.begin(None)
    await local.controller.set_version(0)
    running: Any = local.controller._running
    await until(lambda: {0, 1, 2} <= set(running.progress))
    assert unfinished(tmp_path) == []
    for group in (0, 1, 2):
        running.progress[group].loops[1] = FrozenLoop("state", calls={0: CallRecord("digest")})
    await asyncio.gather(*(running.persist(group) for group in (2, 0, 1)))
    file = JournalFile(tmp_path / JOURNAL_FILE)
    assert sorted(unfinished(tmp_path)) == [0, 1, 2]
    for record in file.read():
        if read_head(record)["kind"] == "unfinished":
            assert decode_unfinished(record).loops[1] == FrozenLoop("state", calls={0: CallRecord("digest")})
    (tmp_path / JOURNAL_FILE).unlink()
    (tmp_path / JOURNAL_FILE).mkdir()  # nothing can be written there
    with pytest.raises(RolloutError, match="a tool whose calls must not be repeated was about to be called"):
        await running.persist(0)
    await local.controller.shutdown()


async def test_a_group_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the write, one for the other's turn. What they have is written as soon as the disk answers."""
    local = controller(tmp_path, monkeypatch, rollout={"journal_s": 60.0}, timeouts={"rpc_s": 0.1})
    local.fleet.held = set(range(9))
    await local.controller.begin(None)
    await local.controller.set_version(0)
    running: Any = local.controller._running
    await until(lambda: {0, 1} <= set(running.progress))
    answers, append = threading.Event(), JournalFile.append

    def hang(file: JournalFile, records: list[bytes]) -> None:
        assert answers.wait(20)
        append(file, records)

    monkeypatch.setattr(JournalFile, "append", hang)
    ended = await asyncio.gather(running.persist(0), running.persist(1), return_exceptions=True)
    answers.set()
    for group, error in enumerate(ended):
        assert isinstance(error, RolloutError)
        assert str(error) == (
            f"group {group} waited 0.1 s (timeouts.rpc_s) for {tmp_path / JOURNAL_FILE} to be written, and a tool "
            "whose calls must not be repeated was about to be called; check the disk"
        )
    for group in (0, 1):
        running.progress[group].loops[1] = FrozenLoop("state", calls={0: CallRecord("digest")})
    await running.persist(1)
    assert 1 in unfinished(tmp_path)
    await local.controller.shutdown()


def test_a_group_that_has_called_a_tool_before_its_first_token_is_kept() -> None:
    """Its calls may not be repeated; it is as old as the version at which the run resumes."""
    kept = KeptGroups(
        [
            EpochRecord(INITIAL, {}).encode(),
            encode_unfinished(3, UnfinishedGroup({}, {0: FrozenLoop(calls={0: CallRecord("digest")})}), "a problem"),
            encode_unfinished(4, UnfinishedGroup({}, {}), "another"),
        ]
    )
    kept.resume(INITIAL, 7)
    assert kept.versions() == {3: {7}, 4: set()}


async def test_the_journal_is_at_most_its_interval_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished and unfinished groups are written each time, by a clock that only the test moves."""
    interval_s = 7.0
    journal = controller(tmp_path, monkeypatch, rollout={"journal_s": interval_s}).controller._journal
    progress: dict[int, GroupProgress] = {}
    loop = asyncio.get_running_loop()
    now = loop.time()

    async def move(seconds: float, ends: Callable[[], bool]) -> None:
        """Other tasks and threads then have some real time."""
        nonlocal now
        now += seconds
        deadline = time.monotonic() + 2 * WAIT_S
        while not ends() and time.monotonic() < deadline:
            await asyncio.sleep(0)

    history = History(-1, 0, frozenset())
    await journal.begin(None, history)
    await journal.begin_epoch(0, [])
    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr("megarl.rollout.resume.journal.time", SimpleNamespace(monotonic=lambda: now))
    keeps_up = asyncio.ensure_future(journal.keep_up(lambda: history, progress))
    await asyncio.sleep(0)
    for number in (1, 2):
        journal.note([Trajectory(number, 0, [5], [9], [-0.5], (VersionSpan(0, 0, 1),), "stop", 0.0, {})], PROMPT)
        progress[10 + number] = GroupProgress(PROMPT)
        progress[10 + number].record(0, FrozenLoop().freeze("{}", 0, 0))
        early_until = time.monotonic() + 0.05
        await move(interval_s - 0.5, lambda: time.monotonic() > early_until)
        assert journalled(tmp_path) == list(range(1, number)), "it is written before it is time"
        await move(1.0, lambda: not journal._pending)
        assert journalled(tmp_path) == list(range(1, number + 1)), "it is not written at the interval"
        assert unfinished(tmp_path) == list(range(11, 11 + number))
        await move(-0.5, lambda: True)  # the interval began half a second ago
    keeps_up.cancel()


async def test_other_tasks_run_while_the_journal_looks_at_thousands_of_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two small portions of the groups; each group is still written, and once."""
    journal = controller(tmp_path, monkeypatch).controller._journal
    progress: dict[int, GroupProgress] = {}
    for group in range(5 * GROUPS_AT_ONCE):
        progress[group] = GroupProgress(PROMPT)
        progress[group].record(0, FrozenLoop().freeze("{}", 0, 0))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count())
    records = await journal._take_grown(progress)
    other.cancel()
    assert turns >= 5
    assert [read_head(record)["group"] for record in records] == list(progress)
    assert await journal._take_grown(progress) == [], "nothing has grown since"


@pytest.mark.parametrize(("replay", "written_again"), [("none", [101, 102]), ("r3", [126, 158])])
async def test_running_responses_with_experts_are_written_again_after_some_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: str, written_again: list[int]
) -> None:
    """Their experts take hundreds of bytes per token: written at each interval, they would fill the disk's time."""
    journal = controller(tmp_path, monkeypatch, trainer={"router_replay": replay}).controller._journal
    progress = GroupProgress(PROMPT)
    progress.begin(GenerateRequest("r", [1], SamplingSpec(500, 1.0, ())), (0, 0))
    sizes: list[int] = []
    for size in range(100, 160):
        progress.tokens["r"] = ResponsePart(response_ids=[7] * size, logprobs=[-1.0] * size)
        if await journal._take_grown({0: progress}):
            sizes.append(size)
    assert sizes[0] == 100 and sizes[1:3] == written_again
