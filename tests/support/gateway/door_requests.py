"""Requests to a stand-in door, with its token."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.gateway.door_stand_in import TOKEN, StandInDoor

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def post(door: StandInDoor, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(door.url + path, json=body, headers={**HEADERS, **headers}, timeout=60)


def generate(door: StandInDoor, ids: list[int], session: str = "", **sampling: Any) -> dict[str, Any]:
    """The content of the answer on the token route."""
    headers = {"X-Session-ID": session} if session else {}
    answer = post(door, "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}, **headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def get(door: StandInDoor, path: str) -> dict[str, Any]:
    answer = httpx.get(door.url + path, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
