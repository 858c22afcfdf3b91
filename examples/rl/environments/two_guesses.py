"""A custom harness: the model guesses, hears that it may be wrong, and guesses again."""

from __future__ import annotations

from typing import Any

import openai


async def act(base_url: str, token: str, session: str, row: dict[str, Any], doubt: str = "Are you sure?") -> None:
    headers = {"X-Session-ID": session}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=token, default_headers=headers) as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = [{"role": "user", "content": row["problem"]}]
        first = await client.chat.completions.create(model=model, messages=messages)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": doubt}]
        await client.chat.completions.create(model=model, messages=messages)  # the reward function judges this answer
