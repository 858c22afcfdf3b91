"""Functions that act for a sample through the gateway, as a user writes them (`agent.act`)."""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import openai

from megarl.rewards.types import RewardResult
from tests.support.models.tiny_vision import picture
from tests.support.rollout.picture_agents import data_url


async def two_turns(base_url: str, token: str, session: str, row: dict[str, Any], keep: str = "") -> None:
    """A dialogue of two turns and a second answer to the first message; `keep`: where it writes session and process."""
    headers = {"X-Session-ID": session}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=token, default_headers=headers) as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = [{"role": "user", "content": "Say something."}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0.0)
            said = answer.choices[0].message
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "And more."}]
        await client.chat.completions.create(
            model=model, messages=[*messages[:2], {"role": "user", "content": "Else."}]
        )
    if keep:
        process = Path("/proc/self/cmdline").read_text().strip("\0")  # of an actor, its class
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60.0) as http:
            content = (await http.get(f"{base_url}/sessions/{session}")).json()
        (Path(keep) / f"{session}.json").write_text(json.dumps({"row": row, "process": process, **content}))


async def shows_pictures(base_url: str, token: str, session: str, row: dict[str, Any]) -> float:
    """A dialogue of two turns, in which each message of the user has a picture of its own."""
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=token, default_headers={"X-Session-ID": session}
    ) as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = []
        for number in range(2):
            shown = {
                "type": "image_url",
                "image_url": {"url": data_url(picture(90, 60, zlib.crc32(session.encode()) + number))},
            }
            messages.append({"role": "user", "content": [{"type": "text", "text": row["problem"]}, shown]})
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return float(session.split("-")[-2] in "02")  # the sample's number, so that groups have a signal


async def handles_a_refusal(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
    """A prompt that does not fit, then one that does, and then a failure of its own."""
    headers = {"X-Session-ID": session}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=token, default_headers=headers) as client:
        model = (await client.models.list()).data[0].id
        for content in ("x" * 100_000, "Say something."):
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    raise LookupError("a mistake of its own")


async def rewarded(base_url: str, token: str, session: str, row: dict[str, Any], score: Any = 0.5) -> Any:
    """One turn, with a reward of its own."""
    await two_turns(base_url, token, session, row)
    return RewardResult(score, {"turns": 3.0}) if score == 0.75 else score


async def calls_a_tool(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
    """The answer to the model's call comes from a tool, and a user's message follows."""
    headers = {"X-Session-ID": session}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=token, default_headers=headers) as client:
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        messages: list[Any] = [{"role": "user", "content": "1 + 1?"}]
        first = await client.chat.completions.create(model="stand-in", messages=messages, tools=tools)
        said = first.choices[0].message
        messages += [said.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "content": "2", "tool_call_id": call.id} for call in said.tool_calls or ()]
        messages += [{"role": "assistant", "content": "I am sure."}, {"role": "user", "content": "Well?"}]
        await client.chat.completions.create(model="stand-in", messages=messages, tools=tools)


async def nothing(base_url: str, token: str, session: str, row: dict[str, Any]) -> float:
    """Makes no request."""
    return 1.0


async def fails(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
    """Has a mistake of its own."""
    raise KeyError("no such tool")


def no_coroutine(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
    """Is not what `agent.act` has to name."""
