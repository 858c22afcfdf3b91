"""The gateway of a real pool of two engines: their own tokens, a chat, a publication in mid-request, and what may die.

The last test kills the supervisor, so that nothing may be left of this pool, whose gateway has a port of its own.

One pool serves all tests of this file, in order: the last ones kill parts of it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from megarl.cluster.pool.pool_process import read_state
from megarl.common.errors import RolloutError
from megarl.common.process.processes import descendants
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.pool.leftovers import of_private_directory
from tests.support.pool.pool import TestPool, start_pool
from tests.support.pool.pool_checks import (
    GONE_S,
    assert_all_go,
    command_of,
    everything,
    generate,
    private_of,
    process_of,
    reference_logprobs,
    serve,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STOP = 2
WAIT_S = 240


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestPool]:
    # Not this process, in which other tests have opened sockets of their own.
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"])
    running = start_pool(
        tmp_path_factory.mktemp("gateway"),
        agent_pid=launcher.pid,
        gateway={"enabled": True},
        rollout={"replicas": 2, "max_model_len": 400, "report_interval_s": 0.5},
    )
    running.client.begin(None)  # as a trainer does, without which there is nothing to go on with after a failure
    yield running
    running.close()
    launcher.kill()
    launcher.wait()


class Client:
    """A harness, which knows no more of the gateway than gateway.json."""

    def __init__(self, run_dir: Path) -> None:
        self.gateway = json.loads((run_dir / "gateway.json").read_text())
        self.token = Path(self.gateway["token_file"]).read_text().strip()
        self.headers = {"Authorization": f"Bearer {self.token}"}

    def generate(self, ids: list[int], session: str = "", **sampling: Any) -> dict[str, Any]:
        headers = {**self.headers, **({"X-Session-ID": session} if session else {})}
        body = {"token_ids": ids, "sampling_params": {"logprobs": 1, **sampling}}
        answer = httpx.post(f"{self.gateway['url']}/inference/v1/generate", json=body, headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


@pytest.fixture(scope="module")
def client(pool: TestPool) -> Client:
    return Client(pool.config.run_dir)


def test_before_the_first_publication_a_request_waits_and_is_answered_after_it(pool: TestPool, client: Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.generate, [5, 6, 7], max_tokens=3, ignore_eos=True)
        serve(pool, 1)
        assert len(asked.result(WAIT_S)["token_ids"]) == 3


def test_the_tokens_are_the_engines_own(pool: TestPool, client: Client) -> None:
    serve(pool, 3)
    replica = pool.client.engine_handles().replicas()[0]
    prompt = [10, 20, 30, 40]
    for seed in range(3):
        choice = client.generate(prompt, seed=seed, max_tokens=24, temperature=1.0)
        [part] = generate(replica, [GenerateRequest(f"own-{seed}", prompt, SamplingSpec(24, 1.0, (STOP,)), seed)])
        assert choice["token_ids"] == part.response_ids and choice["finish_reason"] == part.finish_reason
        sent = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert sent == pytest.approx(part.logprobs, abs=1e-5)
        assert sent == pytest.approx(reference_logprobs(pool, prompt, choice["token_ids"]).tolist(), abs=1e-4)
        [span] = choice["weight_versions"]  # by either replica: they have the same weights
        assert span == {"version": "3", "start": 0, "end": len(part.response_ids), "replica": span["replica"]}
        assert span["replica"] in (0, 1)


def test_a_chat_by_openais_client_is_recorded(pool: TestPool, client: Client) -> None:
    made = openai.OpenAI(base_url=client.gateway["base_url"], api_key=client.token, timeout=WAIT_S)
    create = made.with_options(default_headers={"X-Session-ID": "chat"}).chat.completions.create
    model = made.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "1+1?"}]
    first = create(model=model, messages=messages, max_tokens=20, seed=1)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And 2+2?"}]
    second = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in create(model=model, messages=messages, max_tokens=20, seed=2, stream=True)
    )
    one, two = httpx.get(f"{client.gateway['url']}/v1/sessions/chat", headers=client.headers, timeout=60).json()[
        "turns"
    ]
    assert two["parent"] == 0
    before = one["prompt_ids"] + one["response_ids"]
    assert two["prompt_ids"][: len(before)] == before and len(two["prompt_ids"]) > len(before)
    again = client.generate(two["prompt_ids"], seed=2, max_tokens=20)  # the turn is what the engine makes of its prompt
    assert again["token_ids"] == two["response_ids"]
    assert [entry["logprob"] for entry in again["logprobs"]["content"]] == pytest.approx(two["logprobs"], abs=1e-5)
    assert isinstance(second, str)


def test_a_publication_in_mid_request(pool: TestPool, client: Client) -> None:
    """The machine decides if it comes in the middle, so it is tried until it does."""
    replicas = pool.client.engine_handles().replicas()
    for version in range(4, 40):
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.generate, [9, 8, 7], max_tokens=390, ignore_eos=True)
            wait_until(
                lambda asked=asked: asked.done() or any(r.call("status", timeout_s=60).running for r in replicas),
                WAIT_S, "the request to begin",
            )  # fmt: skip
            for replica in replicas:
                replica.call("pause", True, timeout_s=60)
            serve(pool, version)
            for replica in replicas:
                replica.call("resume", timeout_s=60)
            choice = asked.result(WAIT_S)
        assert len(choice["token_ids"]) == 390 and choice["finish_reason"] == "length"
        spans = choice["weight_versions"]
        if len(spans) == 2 and spans[0]["end"] > 0:
            assert spans[0]["end"] == spans[1]["start"] and spans[1] == {
                **spans[1],
                "version": str(version),
                "end": 390,
            }
            return
    raise AssertionError("no publication came in the middle of a request")


def test_strangers_are_refused_and_the_port_is_on_loopback(pool: TestPool, client: Client) -> None:
    for headers in ({}, {"Authorization": "Bearer nothing"}):
        assert httpx.get(f"{client.gateway['url']}/v1/models", headers=headers, timeout=60).status_code == 401
    assert Path(client.gateway["token_file"]).stat().st_mode & 0o777 == 0o600
    assert (pool.config.run_dir / "gateway.json").stat().st_mode & 0o777 == 0o600
    check_on_loopback(pool.config.run_dir, "ray::GatewayActor")


def gateway_process(pool: TestPool) -> int:
    state = read_state(pool.config.run_dir)
    assert state is not None
    found = [each for each in descendants(state["process"]["pid"]) if command_of(each).startswith("ray::GatewayActor")]
    assert len(found) == 1
    return found[0].pid


def test_a_gateway_that_is_killed_is_replaced_at_the_same_address(pool: TestPool, client: Client) -> None:
    before = gateway_process(pool)
    os.kill(before, signal.SIGKILL)

    def answers() -> bool:
        try:
            return (
                httpx.get(f"{client.gateway['url']}/v1/models", headers=client.headers, timeout=60).status_code == 200
            )
        except httpx.HTTPError:
            return False

    wait_until(answers, WAIT_S, "the gateway to be open again")
    assert gateway_process(pool) != before and Client(pool.config.run_dir).gateway == client.gateway
    assert len(client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_requests_go_on_when_the_controller_is_killed(pool: TestPool, client: Client) -> None:
    state = read_state(pool.config.run_dir)
    assert state is not None
    below = descendants(state["process"]["pid"])
    [controller] = [each for each in below if command_of(each).startswith("ray::RolloutController")]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(client.generate, [30 + i, 6, 7], max_tokens=380, ignore_eos=True) for i in range(4)]
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(lambda: (read_state(pool.config.run_dir) or {}).get("rebuilds") == 1, WAIT_S, "a new controller")
        serve(pool, 50)  # the trainer's next call tells the new controller how far it has come
        assert [len(each.result(WAIT_S)["token_ids"]) for each in asked] == [380] * 4


def test_a_replica_that_is_killed_costs_no_request(pool: TestPool, client: Client) -> None:
    replica = pool.client.engine_handles().replicas()[0]
    process = process_of(replica)
    with ThreadPoolExecutor(8) as threads:

        def ask(index: int) -> dict[str, Any]:
            return client.generate([50 + index, 6, 7], max_tokens=380, ignore_eos=True)

        asked = [threads.submit(ask, index) for index in range(8)]
        wait_until(lambda: replica.call("status", timeout_s=60).running > 0, WAIT_S, "the replica to have a request")
        os.kill(process.pid, signal.SIGKILL)
        for each in asked:
            choice = each.result(WAIT_S)
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 380


def test_nothing_outlives_a_killed_supervisor(pool: TestPool) -> None:
    private = private_of(pool)
    assert len(of_private_directory(private)) > 1
    assert_all_go(everything(pool), lambda: os.kill(pool.handle.process.pid, signal.SIGKILL))
    wait_until(lambda: not of_private_directory(private), GONE_S, "the guardian to remove the private directory")
    with pytest.raises(RolloutError, match="its supervisor was killed"):
        pool.client.members()
