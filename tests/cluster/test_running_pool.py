"""The rollout side on a real engine: batches, versions, log-probs, evaluation; then the ways in which it can end.

One pool serves all tests of this file, in order: the last ones kill parts of it. A supervisor that is killed ends the
pool of tests/gateway/test_real_pool.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.chat.tokenize import load_tokenizer
from megarl.cluster.pool.pool_process import launch_supervisor, read_state
from megarl.common.errors import BatchNotReady, ReplicaFailed, RequestFailed, RolloutError
from megarl.common.process import held_outputs
from megarl.common.process.processes import descendants, is_alive
from megarl.data.mixture import Cursor
from megarl.queue.trajectory import VersionSpan
from megarl.queue.transfer import QueueReader
from megarl.rollout.engine.continuation import ResponseCollector
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.run.record.batch_metrics import record_batch
from megarl.run.step.plan import plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.pool.leftovers import (
    of_private_directory,
    open_to_others,
    sockets_and_temporary_files,
    survivors,
)
from tests.support.pool.pool import TestPool, pool_config, start_pool
from tests.support.pool.pool_checks import (
    GONE_S,
    assert_all_go,
    check_rows,
    command_of,
    everything,
    generate,
    private_of,
    process_of,
    reference_logprobs,
    serve,
)
from tests.support.trainer.configs import write_problems
from tests.support.trainer.trained_groups import trained_as_planned
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

TEMPERATURE = 0.7
MODEL_LEN = 64
REFUSED_STEP, REFUSED_GROUP = 3, 13
FIRST_VERSION = 10  # of step 0; each step makes one more
PROBLEMS = 32


def fake_agent() -> subprocess.Popen[bytes]:
    """Stands for torchrun's agent: something whose end must end the pool."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])


@pytest.fixture(scope="module")
def agent() -> Iterator[subprocess.Popen[bytes]]:
    process = fake_agent()
    yield process
    process.kill()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def private(pool: TestPool) -> Path:
    """The pool's private directory."""
    return private_of(pool)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, agent: subprocess.Popen[bytes]) -> Iterator[TestPool]:
    """A pool whose engine refuses the prompt of REFUSED_GROUP, which is longer than the engine's sequences.

    The command line refuses such a config, which `start_pool` does not check as a whole.
    """
    directory = tmp_path_factory.mktemp("pool")
    path = write_problems(directory / "problems.jsonl", PROBLEMS)
    problems = path.read_text().splitlines()
    refused = Cursor(PROBLEMS, seed=0, shuffle=True).at(REFUSED_GROUP)[1]
    problems[refused] = json.dumps({"problem": "1+" * MODEL_LEN + "1", "answer": str(MODEL_LEN + 1)})
    path.write_text("\n".join(problems) + "\n")
    # Its engine makes the longest response in less time than tokens are held; they are reported as they are made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(held_outputs.VARIABLE, "0")
        running = start_pool(
            directory,
            agent_pid=agent.pid,
            sampling={"temperature": TEMPERATURE, "max_tokens": 24},
            data={"path": path, "max_prompt_tokens": 4 * MODEL_LEN},
            # Without the journal, every group is drawn again after `begin`, so that the engine has work.
            rollout={"max_model_len": MODEL_LEN, "journal_s": 0},
        )
    yield running
    running.close()


@pytest.fixture(scope="module")
def reader(pool: TestPool) -> Iterator[QueueReader]:
    attached = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
    yield attached
    attached.close()


def keys_in_queue(reader: QueueReader) -> list[str]:
    """Return the keys of all rows, which a run never asks for."""
    return list(reader.call(reader.tags(), "list its rows"))


def test_synchronous_steps(pool: TestPool, reader: QueueReader) -> None:
    client, batch = pool.client, pool.config.batch
    [held] = client.devices()
    assert held.owner == "replica 0" and held.devices == ()
    prompts = []
    for step in range(2):
        serve(pool, FIRST_VERSION + step)
        ready = client.wait_batch(step)
        assert client.wait_batch(step) == ready
        assert ready.counters.taken == batch.groups and ready.counters.balanced
        assert len(ready.keys) == batch.groups * batch.samples_per_group
        assert [key.split(":")[0] for key in ready.keys[:: batch.samples_per_group]] == [
            str(group) for group in range(step * batch.groups, (step + 1) * batch.groups)
        ]
        rows = reader.fetch(ready.keys)
        prompts += [tuple(row.prompt_ids) for row in rows[:: batch.samples_per_group]]
        check_rows(pool, rows, version=FIRST_VERSION + step)
        tags = reader.read_tags(ready.keys)
        assert [(tag.reward, tag.response_tokens) for tag in tags] == [(r.reward, len(r.response_ids)) for r in rows]
        assert ready.timings["rollout/engine_seconds"] > 0 and ready.timings["rollout/replicas_alive"] == 1
        assert 0 < ready.timings["rollout/kv_usage_max"] < 1 <= ready.timings["rollout/running_max"]
        counters = client.commit(step, trained=3, filtered=1, dropped_stale=0, failed=0)
        assert (counters.trained, counters.filtered, counters.taken) == (3 * (step + 1), step + 1, 0)
        wait_until(lambda: keys_in_queue(reader) == [], 60, "the queue to forget the step's rows")
    assert len(set(prompts)) == 2 * batch.groups


def test_rewards_judge_the_text_without_special_tokens(pool: TestPool, reader: QueueReader) -> None:
    decode = load_tokenizer(pool.config.model.path).decode
    serve(pool, FIRST_VERSION + 2)
    ready = pool.client.wait_batch(2)
    for row in reader.fetch(ready.keys):
        text = decode(row.response_ids).replace("<|im_end|>", "").replace("<|im_start|>", "")
        text = text.replace("<|endoftext|>", "").replace("<unk>", "")
        assert row.reward == pytest.approx(sum(c.isdigit() for c in text) / max(1, len(text)))
    group = int(ready.keys[0].split(":")[0])
    problem = decode(reader.fetch(ready.keys[:1])[0].prompt_ids).split("user\n")[1].split("=")[0]
    left, right = problem.split("+")
    assert pool.client.references([group]) == {group: str(int(left) + int(right))}
    pool.client.commit(2, trained=0, filtered=4, dropped_stale=0, failed=0)


def test_a_request_that_the_engine_refuses_fails_its_call_and_leaves_the_replica_in_service(pool: TestPool) -> None:
    [replica] = pool.client.engine_handles().replicas()
    spec = SamplingSpec(4, 0.0, (2,))
    long, short = GenerateRequest("long", [5] * (MODEL_LEN + 1), spec), GenerateRequest("short", [5, 6], spec)
    with pytest.raises(RequestFailed, match=r"^replica 0 refused a request: .*maximum.*length"):
        generate(replica, [long])
    with pytest.raises(RequestFailed, match=r"^replica 0 refused a request"):
        generate(replica, [replace(short, request_id="alongside"), long])
    assert 1 <= len(generate(replica, [short])[0].response_ids) <= 4


def test_a_group_whose_request_is_refused_is_counted_as_failed(pool: TestPool, reader: QueueReader) -> None:
    """The other groups of the step are sampled by the same replica, and every group ends once."""
    batch = pool.config.batch
    serve(pool, FIRST_VERSION + REFUSED_STEP)
    ready = pool.client.wait_batch(REFUSED_STEP)
    rows = reader.fetch(ready.keys)
    failed = [row for row in rows if row.group_id == REFUSED_GROUP]
    assert len(rows) == batch.groups * batch.samples_per_group and len(failed) == batch.samples_per_group
    for row in failed:
        assert row.status == "failed" and row.failure.startswith("replica 0 refused a request: ")
        assert (row.prompt_ids, row.response_ids, row.rollout_logprobs, row.versions) == ([], [], [], ())
    served = [row for row in rows if row.group_id != REFUSED_GROUP]
    check_rows(pool, served, version=FIRST_VERSION + REFUSED_STEP)
    assert ready.timings["rollout/replicas_alive"] == 1 and ready.counters.balanced
    tags = reader.read_tags(ready.keys)
    plan = plan_step(tags, pool.config, dp_size=1, version=FIRST_VERSION + REFUSED_STEP)
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert values["groups/failed"] == 1 and values["groups/admitted"] == batch.groups
    assert values["batch/failed_samples"] == batch.samples_per_group
    ended = {name: int(values[f"groups/{name}"]) for name in ("trained", "filtered", "dropped_stale", "failed")}
    counters = pool.client.commit(REFUSED_STEP, **ended)
    assert counters.balanced and counters.failed == 1
    assert counters.admitted == counters.settled == (REFUSED_STEP + 1) * batch.groups


def test_wrong_bookkeeping_and_missing_batches_are_errors(pool: TestPool) -> None:
    with pytest.raises(ValueError, match="never taken"):
        pool.client.commit(4, trained=4, filtered=0, dropped_stale=0, failed=0)
    with pytest.raises(BatchNotReady, match=r"waited 0 s for the batch of step 4; groups in flight: 0"):
        pool.client.wait_batch(4, timeout_s=0.3)


def test_going_back_drops_what_is_in_flight_and_redraws_the_same_groups(pool: TestPool, reader: QueueReader) -> None:
    """A restarted trainer begins from step 4 while that step's groups are in flight, in the queue or taken."""
    state = pool.client.state_dict()
    assert state["admission"]["steps"] == 4
    responses = []
    for wait in (True, False):
        serve(pool, FIRST_VERSION + 4)
        if wait:
            ready = pool.client.wait_batch(4)
        counters = pool.client.begin(state)
        assert counters.balanced and counters.admitted == 4 * pool.config.batch.groups
        wait_until(lambda: keys_in_queue(reader) == [], 60, "the queue to be empty")
    assert counters.rolled_back == 2 * pool.config.batch.groups
    for _ in range(2):
        serve(pool, FIRST_VERSION + 4)
        again = pool.client.wait_batch(4)
        assert again.keys == ready.keys and again.counters.rolled_back >= counters.rolled_back
        responses.append([row.response_ids for row in reader.fetch(again.keys)])
        pool.client.begin(state)
    assert responses[0] == responses[1]


def test_running_responses_end_before_a_publication_that_waits_for_them(pool: TestPool, reader: QueueReader) -> None:
    """They have ended when `drain` returns; only their rewards may still be on the way. `begin` ends the hold."""
    state = pool.client.state_dict()
    step = state["admission"]["steps"]
    version = FIRST_VERSION + step
    for _ in range(2):
        serve(pool, version)
        pool.client.drain()
        [replica] = pool.client.engine_handles().replicas()
        replica.call("set_weight_version", str(version + 1), timeout_s=60)  # no token of it is in the batch
        ready = pool.client.wait_batch(step, timeout_s=GONE_S)
        check_rows(pool, reader.fetch(ready.keys), version=version)
        pool.client.begin(state)


def test_evaluation_repeats_and_keeps_every_answer(pool: TestPool) -> None:
    version = FIRST_VERSION + 4
    [first], [second] = pool.client.evaluate(version, "before"), pool.client.evaluate(version, "again")
    assert first == second
    assert (first.name, first.version, first.n) == ("held_out", version, 8)
    assert first.greedy.mean.value != first.sampled.mean.value
    records = [json.loads(line) for line in (pool.config.run_dir / "eval_before.jsonl").read_text().splitlines()]
    assert len(records) == 16 and {record["mode"] for record in records} == {"greedy", "sampled"}
    greedy = [record["score"] for record in records if record["mode"] == "greedy"]
    assert sum(greedy) / 8 == pytest.approx(first.greedy.mean.value)
    assert records[0]["reference"] == "201" and "100+101=?" in records[0]["prompt"]


def test_seeded_requests_repeat_in_another_order_and_across_a_pause(pool: TestPool) -> None:
    [replica] = pool.client.engine_handles().replicas()
    spec = SamplingSpec(24, TEMPERATURE, (2,))
    wanted = [GenerateRequest(f"a{i}", [1, 60 + i], spec, seed=i) for i in range(6)]
    again = [GenerateRequest(f"b{i}", [1, 60 + i], spec, seed=i) for i in reversed(range(6))]
    first = generate(replica, wanted)
    replica.call("pause", True, timeout_s=60)
    paused: list[Any] = []
    thread = threading.Thread(target=lambda: paused.extend(generate(replica, again)))
    thread.start()
    time.sleep(0.3)
    assert not paused
    replica.call("resume", timeout_s=60)
    thread.join(60)
    assert [(r.response_ids, r.logprobs) for r in reversed(paused)] == [(r.response_ids, r.logprobs) for r in first]


def test_a_response_goes_on_from_its_reported_tokens(pool: TestPool) -> None:
    """It is reported while it is made, ended by us, and continued; transformers agrees with every token of it."""
    [replica] = pool.client.engine_handles().replicas()
    spec = SamplingSpec(MODEL_LEN - 4, TEMPERATURE, (2,))
    replica.call("set_weight_version", "7", timeout_s=60)
    for attempt in range(20):  # until one is still being made when it is ended: the engine may be faster than reports
        requests = [GenerateRequest(f"parts{attempt}-{i}", [1, 60 + i], spec, seed=4 * attempt + i) for i in range(4)]
        responses = ResponseCollector(requests)
        responses.add(replica.call("generate", responses.send(0), 0.02, timeout_s=60)[0])
        while responses.unfinished and not responses.tokens:
            responses.add(replica.call("report", responses.reported, 0.02, timeout_s=60)[0])
        ended, _ = replica.call("end", responses.reported, timeout_s=60)
        if "abort" in {part.finish_reason for part in ended.values()}:
            break
    else:
        pytest.fail("of 20 times four responses, none was still being made after its first report")
    stopped = [name for name, part in ended.items() if part.finish_reason == "abort"]
    responses.add_last(ended)
    known = responses.reported
    assert list(known) == stopped and sum(known.values()) == responses.tokens > 0
    responses.interrupt()
    replica.call("set_weight_version", "8", timeout_s=60)
    last, load = replica.call("generate", responses.send(0), 60.0, timeout_s=60)
    assert 0 < load.kv_usage < 1 and 1 <= load.running <= 4 and load.waiting == 0
    responses.add(last)
    for i, result in enumerate(responses.results()):
        tokens = len(result.response_ids)
        assert (result.response_ids[-1] == 2) == (result.finish_reason == "stop") and 2 not in result.response_ids[:-1]
        assert tokens == spec.max_tokens or result.finish_reason == "stop"
        if (at := known.get(result.request_id)) is not None:
            before = (
                (VersionSpan(7, 0, at, replica=0),) if at else ()
            )  # one may have been stopped before its first token
            assert result.versions == (*before, VersionSpan(8, at, tokens, replica=0)) and result.lost_replicas == 1
        expected = reference_logprobs(pool, [1, 60 + i], result.response_ids)
        assert float((torch.tensor(result.logprobs).double() - expected).abs().max()) <= 1e-4


def test_no_port_of_the_pool_is_beyond_loopback(pool: TestPool) -> None:
    check_on_loopback(
        pool.config.run_dir, "gcs_server", "raylet", "ray::TransferQueueController", "cluster.pool.supervisor"
    )


def test_the_supervisor_lives_in_a_session_of_its_own(pool: TestPool) -> None:
    supervisor = pool.handle.process.pid
    assert os.getsid(supervisor) == supervisor != os.getsid(0)


def test_sockets_and_temporary_files_are_in_a_private_directory(pool: TestPool, private: Path) -> None:
    """Ray makes its own directory open to everybody, but nobody else can reach it."""
    assert private.stat().st_mode & 0o777 == 0o700 and private.stat().st_uid == os.getuid()
    found = sockets_and_temporary_files({pool.handle.process, *descendants(pool.handle.process.pid)})
    assert any("plasma_store" in path.name for path in found), found
    tag = private.name.removeprefix("megarl-")
    strange = {path for path in found if private not in path.parents and tag not in path.name}
    assert not {path for path in strange if pool.config.run_dir not in path.parents}
    assert list(Path("/dev/shm").glob(f"sem.{tag}-*")), "the engine's semaphores have another name"


def test_a_killed_engine_actor_fails_its_calls_by_name_and_takes_its_engine_along(pool: TestPool) -> None:
    [replica] = pool.client.engine_handles().replicas()
    actor = process_of(replica)
    [engine] = [each for each in descendants(actor.pid) if "resource_tracker" not in command_of(each)]
    replica.call("pause", True, timeout_s=60)
    answers: list[object] = []

    def wait() -> None:
        answers.append(pool.client.wait_batch(4))

    pool.client.set_version(FIRST_VERSION + 4)
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    os.kill(actor.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(engine), 60, "the engine of the killed actor")
    thread.join(GONE_S)
    [answer] = answers  # only the trainer, which waits, can bring another engine
    assert isinstance(answer, PublicationNeeded)
    assert "replica 0 died" in answer.reason and "replica-0.log" in answer.reason
    with pytest.raises(ReplicaFailed, match="replica 0"):
        replica.call("devices", timeout_s=60)


@pytest.mark.slow  # one more engine start
def test_a_restarted_replica_works_again(pool: TestPool) -> None:
    handles = pool.client.engine_handles()
    handles.restart(["replica 0"], timeout_s=1200)
    [replica] = handles.replicas()
    request = GenerateRequest("fresh", [1, 2, 3], SamplingSpec(4, 0.0, (2,)))
    assert 1 <= len(generate(replica, [request])[0].response_ids) <= 4


def test_nothing_outlives_a_killed_agent(pool: TestPool, agent: subprocess.Popen[bytes], private: Path) -> None:
    assert_all_go(everything(pool), agent.kill)
    state = read_state(pool.config.run_dir)
    assert state is not None and state["state"] == "stopped" and str(agent.pid) in state["error"]
    with pytest.raises(RolloutError, match=r"has ended: the launcher \(pid \d+\) is gone"):
        pool.client.members()
    wait_until(lambda: not of_private_directory(private), GONE_S, "the private directory to go")
    assert (pool.config.run_dir / "logs/ray/raylet.out").is_file() and not open_to_others(pool.config.run_dir)
    pool.client.close()


@pytest.mark.slow  # one more engine start
def test_an_engine_that_cannot_start_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    config = pool_config(tmp_path)
    weights = config.model.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    before = descendants(os.getpid())
    from megarl.cluster.client.pool_client import PoolClient

    handle = launch_supervisor(config.model_dump_json(), config.run_dir, os.getpid())
    children = descendants(handle.process.pid)
    with pytest.raises(RolloutError, match=r"engine replica 0: replica 0 failed to start: .*SafetensorError: .*header"):
        PoolClient.connect(handle, config)
    wait_until(
        lambda: not any(map(is_alive, {handle.process, *children})) and descendants(os.getpid()) <= before,
        GONE_S,
        "the failed pool to go",
    )


@pytest.mark.slow  # one more engine start
def test_an_engine_that_is_killed_while_it_starts_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """The actor dies before it has answered once."""
    from megarl.cluster.client.pool_client import PoolClient

    config = pool_config(tmp_path)
    handle = launch_supervisor(config.model_dump_json(), config.run_dir, os.getpid())

    def actors() -> list[psutil.Process]:
        return [each for each in survivors(config.run_dir) if "ray::EngineReplica" in " ".join(each.cmdline())]

    try:
        wait_until(lambda: bool(actors()), 400.0, "the engine's actor")
        actors()[0].kill()
        with pytest.raises(RolloutError, match="engine replica 0: "):
            PoolClient.connect(handle, config)
        wait_until(lambda: not survivors(config.run_dir), GONE_S, "the failed pool to go")
    finally:
        for each in survivors(config.run_dir):
            each.kill()
