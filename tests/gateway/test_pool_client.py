"""A controller that dies: what was open goes on at the next one, from the tokens that the gateway has."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from megarl.gateway.pool_client import ControllerClient
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.fleet.external_requests import ExternalRequests
from tests.support.gateway.gateway_requests import generate
from tests.support.gateway.gateway_stand_in import LocalController, Parts
from tests.support.waiting import wait_until


def count(request: GenerateRequest) -> list[int]:
    """Counts on from the last token, within the vocabulary."""
    last = request.prompt_ids[-1]
    return [4 + (last - 4 + i) % 90 for i in range(1, request.sampling.max_tokens + 1)]


def test_requests_go_on_at_a_new_controller(gateways) -> None:
    gateway = gateways(count, pace_s=0.01)

    def die(parts: Parts) -> None:
        parts.controller.dead = True
        parts.controller.requests.close()

    def replace(parts: Parts) -> None:
        parts.controller = LocalController(ExternalRequests(parts.fleet, serves=True))

    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(generate, gateway, [10], max_tokens=100)
        wait_until(lambda: gateway.call(lambda parts: bool(parts.replicas[0].asked)), 60, "the request to begin")
        gateway.call(die)
        later = threads.submit(generate, gateway, [30], max_tokens=3)
        gateway.call(replace)
        assert asked.result(60)["choices"][0]["token_ids"] == [4 + (6 + i) % 90 for i in range(1, 101)]
        assert later.result(60)["choices"][0]["token_ids"] == [31, 32, 33]


async def test_a_search_for_the_controller_that_does_not_end_is_made_again() -> None:
    """Ray may not answer while it has lost the controller's node."""
    searches: list[str] = []

    found = object()

    async def find() -> object:
        searches.append("search")
        if len(searches) == 1:
            await asyncio.Event().wait()
        return found

    async with asyncio.timeout(30):
        assert await ControllerClient("gateway", find, 0.1)._connect() is found
    assert len(searches) == 2


def test_requests_of_one_turn_share_a_call(gateways) -> None:
    gateway = gateways(count)
    wait_until(lambda: gateway.call(lambda parts: parts.controller.calls) == 1, 60, "the link to the controller")
    generate(gateway, [10], max_tokens=3, n=50)
    assert gateway.call(lambda parts: parts.controller.calls) == 2
    assert len(gateway.call(lambda parts: parts.replicas[0].asked)) == 50
