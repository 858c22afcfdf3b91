"""Many clients of a gateway at once, in a process of their own: each has a session of two turns.

    python -m tests.support.gateway.gateway_sessions URL COUNT --tokens 16 --vocabulary 100 < FILE_WITH_TOKEN

At most SENDING clients connect and send at a time, and all of them may wait for their answers. The second turns begin
when all first ones have ended, so that as many requests as there are sessions are under way at once. Writes one JSON
object: `seconds` in all, `most_open`, and the `latencies` of both turns in seconds, from the moment that a client
begins to send. Ends with an error if any answer is not the whole one that was asked for.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import sys
import time
from typing import Any

import aiohttp

SENDING = 64  # the gateway ends connections on which no request arrives for a while
PROMPT_TOKENS = 32
MORE_TOKENS = 8  # what a client says after the first turn
REQUEST_S = 1800.0


class Clients:
    """The clients of one gateway; `run` once."""

    def __init__(self, url: str, count: int, tokens: int, vocabulary: int) -> None:
        self._route, self._count = f"{url}/inference/v1/generate", count
        self._tokens, self._vocabulary = tokens, vocabulary
        self._sending = asyncio.Semaphore(SENDING)
        self._open = self._most_open = 0
        self._latencies: tuple[list[float], list[float]] = ([], [])

    async def run(self, token: str) -> dict[str, Any]:
        """Return what was measured, see the module's docstring. Raises RuntimeError for a refused or cut answer."""
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(self._sent)
        headers = {"Authorization": f"Bearer {token}"}
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_S)
        began = time.perf_counter()
        async with aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=timeout, trace_configs=[trace]
        ) as web:
            firsts = await asyncio.gather(*(self._turn(web, n, self._prompt(n), 0) for n in range(self._count)))
            later = ((n, [*first, *self._drawn(-1 - n, MORE_TOKENS)]) for n, first in enumerate(firsts))
            await asyncio.gather(*(self._turn(web, n, ids, 1) for n, ids in later))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "most_open": self._most_open, "latencies": self._latencies}

    def _prompt(self, number: int) -> list[int]:
        return self._drawn(number, PROMPT_TOKENS)

    def _drawn(self, seed: int, count: int) -> list[int]:
        drawn = random.Random(seed)
        return [drawn.randrange(4, self._vocabulary) for _ in range(count)]

    async def _turn(self, web: aiohttp.ClientSession, number: int, ids: list[int], turn: int) -> list[int]:
        """Send one request; return its tokens and those of its answer."""
        sampling = {"max_tokens": self._tokens, "ignore_eos": True, "logprobs": 0}
        body, headers = {"token_ids": ids, "sampling_params": sampling}, {"X-Session-ID": f"many-{number}"}
        await self._sending.acquire()
        held = contextlib.ExitStack()
        held.callback(self._sending.release)
        self._open += 1
        self._most_open, began = max(self._most_open, self._open), time.perf_counter()
        try:
            async with web.post(self._route, json=body, headers=headers, trace_request_ctx=held) as answer:
                content = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(f"session {number}, turn {turn}: {content}")
        finally:
            held.close()
            self._open -= 1
        self._latencies[turn].append(time.perf_counter() - began)
        made = content["choices"][0]["token_ids"]
        if len(made) != self._tokens or (content["session"]["parent"] is None) != (turn == 0):
            raise RuntimeError(f"session {number}, turn {turn}: {len(made)} tokens, session {content['session']}")
        return [*ids, *made]

    async def _sent(self, session: object, context: Any, params: object) -> None:  # aiohttp's own
        """Let the next client send."""
        context.trace_request_ctx.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--vocabulary", type=int, default=100, help="token ids that prompts may have")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each client's connection is an open file
    clients = Clients(options.url, options.count, options.tokens, options.vocabulary)
    print(json.dumps(asyncio.run(clients.run(sys.stdin.readline().strip()))))


if __name__ == "__main__":
    main()
