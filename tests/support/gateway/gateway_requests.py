"""Requests to a stand-in gateway, with its token."""

from typing import Any

import httpx

from tests.support.gateway.gateway_stand_in import TOKEN, StandInGateway

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def post(gateway: StandInGateway, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, headers={**HEADERS, **headers}, timeout=60)


def generate(gateway: StandInGateway, ids: list[int], session: str = "", **sampling: Any) -> dict[str, Any]:
    """The content of the answer on the token route."""
    headers = {"X-Session-ID": session} if session else {}
    answer = post(gateway, "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}, **headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def get(gateway: StandInGateway, path: str) -> dict[str, Any]:
    answer = httpx.get(gateway.url + path, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
