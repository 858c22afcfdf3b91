"""The gateway against vLLM's own server: the same model, engine settings, requests and machine, in the same run.

    python -m benchmarks.gateway [--json FILE] [--quick] [--rounds N]

Both servers run at the same time, each with one engine, and are asked in turn: 64 clients that send token ids to
/inference/v1/generate, each as soon as it has its answer, with log-probs. The model is that of the race's long task
(27 M parameters, fp32). Rows:

- 128 tokens, 16 tokens: seconds for all requests, gateway / vLLM's server, medians over the rounds.
- The gateway with a session for each client, which records every turn, / the gateway without, by the same requests.
- The same for chats in sessions, which the gateway also renders and decodes; vLLM's server has no chats in this form.

vLLM's server gets the environment of megarl's engines (one thread for the model, and no compilation on a CPU), without
which it would compute with other settings. It takes about ten minutes, with --quick two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lib.length_model import LengthClass, write_model
from benchmarks.lib.report import ROOT, Ratio, finish, new_parser

CONCURRENT = 64
PROMPT_TOKENS = 32
MAX_MODEL_LEN = 512
START_S = 600.0
REQUEST_S = 300.0
SIZE = {"hidden": 448, "layers": 11}
SESSIONS, CHATS = "the gateway with sessions", "the gateway with chats in sessions"
SMALL = {"hidden": 128, "layers": 2}
BOUNDS = {128: 1.1, 16: 1.5}  # tokens of a response: bound of gateway / vLLM's server


@dataclass(frozen=True)
class Server:
    """A server that is up."""

    name: str
    url: str
    token: str
    sessions: bool = False  # each client names a session of its own
    chat: bool = False

    @property
    def route(self) -> str:
        return f"{self.url}/v1/chat/completions" if self.chat else f"{self.url}/inference/v1/generate"

    def headers(self, session: str) -> dict[str, str]:
        """Return the headers of a client whose session, if it has one, is called `session`."""
        return {"X-Session-ID": session} if self.sessions else {}

    def made(self, content: dict[str, Any]) -> int:
        """Return how many tokens an answer has."""
        tokens = content["usage"]["completion_tokens"] if self.chat else len(content["choices"][0]["token_ids"])
        return int(tokens)


def body_of(number: int, tokens: int, vocabulary: int) -> dict[str, object]:
    """Return request `number`: every prompt is different, so that no server saves work by its prefix cache."""
    drawn = random.Random(number)
    prompt = [drawn.randrange(4, vocabulary) for _ in range(PROMPT_TOKENS)]
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling}


def chat_of(number: int, tokens: int) -> dict[str, object]:
    """Return chat number `number`, with as many characters as `body_of` has tokens; each is a token."""
    text = "".join(random.Random(number).choices(string.ascii_lowercase, k=PROMPT_TOKENS))
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": True}
    return {"messages": [{"role": "user", "content": text}], **sampling}


async def _ask(server: Server, requests: list[dict[str, object]], tokens: int, first: int) -> float:
    left = iter(requests)
    headers = {"Authorization": f"Bearer {server.token}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as web:

        async def client(number: int) -> None:
            own = server.headers(f"{first}-{number}")
            for body in left:
                async with web.post(server.route, json=body, headers=own) as answer:
                    content = await answer.json()
                    if answer.status != 200:
                        raise RuntimeError(f"{server.name}: {content}")
                if (got := server.made(content)) != tokens:
                    raise RuntimeError(f"{server.name} made {got} tokens instead of {tokens}")

        began = time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(CONCURRENT)))
        return time.perf_counter() - began


def seconds(server: Server, first: int, count: int, tokens: int, vocabulary: int) -> float:
    """Return how long `count` requests take, sent by 64 clients; their numbers begin at `first`."""
    numbers = range(first, first + count)
    bodies = [chat_of(i, tokens) if server.chat else body_of(i, tokens, vocabulary) for i in numbers]
    return asyncio.run(_ask(server, bodies, tokens, first))


@contextmanager
def started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process during the block; end it, and whatever it has started in its session, afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def end_on_sigterm() -> None:
    """Let SIGTERM (`timeout`, a batch system) end this process as Ctrl-C does: by an exception, which ends the servers.

    They are in sessions of their own, so nobody else ends them, and each holds an engine's memory.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server answers its health check. Raises RuntimeError with the end of its log if it does not."""
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"waited {START_S:.0f} s for {url}; its log ends: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def vllm_server(model: Path, directory: Path) -> Iterator[Server]:
    """Run vLLM's server with the settings of megarl's engines."""
    from megarl.config.loading.load import config_from_tree
    from megarl.rollout.engine.engine_args import engine_environment

    config = config_from_tree(
        {
            "run": {"steps": 1}, "model": {"path": str(model)}, "batch": {"groups": 1, "samples_per_group": 2},
            "sampling": {"max_tokens": 1}, "data": {},
        }
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--tokens-only",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "256", "--logprobs-mode", "processed_logprobs",
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    log, url = directory / "vllm.log", f"http://127.0.0.1:{port}"
    with started(command, log, {**os.environ, **engine_environment(config.rollout, cuda=False)}) as process:
        await_health(process, url, log)
        yield Server("vLLM's server", url, "none")


@contextmanager
def gateway(model: Path, directory: Path) -> Iterator[Server]:
    """Run `megarl serve`."""
    from megarl.gateway.token_file import read_gateway_file

    run_dir, log = directory / "serve", directory / "serve.log"
    command = [
        sys.executable, "-m", "megarl", "serve", "--model", str(model), "--run-dir", str(run_dir),
        "--max-model-len", str(MAX_MODEL_LEN),
    ]  # fmt: skip
    with started(command, log, {**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        deadline = time.monotonic() + START_S
        while "\ncurl " not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"megarl serve did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        found = read_gateway_file(run_dir)
        yield Server("the gateway", found["url"], Path(found["token_file"]).read_text().strip())


def rows_of(taken: dict[tuple[str, int], list[float]], counts: dict[int, int], machine: str) -> list[Ratio]:
    """Return the rows of the report. `taken`: seconds of each round by server and tokens."""
    rows = []
    for tokens, bound in BOUNDS.items():
        ours, theirs = (statistics.median(taken[name, tokens]) for name in ("the gateway", "vLLM's server"))
        details = {
            "the gateway, s": [round(each, 2) for each in taken["the gateway", tokens]],
            "vLLM's server, s": [round(each, 2) for each in taken["vLLM's server", tokens]],
            "requests": counts[tokens],
            "machine": machine,
        }
        name = f"{CONCURRENT} clients, {tokens} tokens: the gateway / vLLM's server"
        rows.append(Ratio(name, ours / theirs, bound, details=details))
        for way in (SESSIONS, CHATS):
            spent = taken[way, tokens]
            name = f"{CONCURRENT} clients, {tokens} tokens: {way} / without"
            rows.append(Ratio(name, statistics.median(spent) / ours, details={"s": [round(each, 2) for each in spent]}))
    return rows


def compare(
    directory: Path, counts: dict[int, int], rounds: int, vocabulary: int
) -> dict[tuple[str, int], list[float]]:
    """Ask both servers in turn; return the seconds of each round by server and tokens."""
    taken: dict[tuple[str, int], list[float]] = {}
    with vllm_server(directory / "model", directory) as theirs, gateway(directory / "model", directory) as ours:
        recorded = replace(ours, name=SESSIONS, sessions=True)
        ways, first = (theirs, ours, recorded, replace(recorded, name=CHATS, chat=True)), 0
        for tokens, count in counts.items():
            for server in ways:  # not measured
                seconds(server, first, CONCURRENT, tokens, vocabulary)
                first += CONCURRENT
            for _ in range(rounds):
                for server in ways:
                    spent = seconds(server, first, count, tokens, vocabulary)
                    taken.setdefault((server.name, tokens), []).append(spent)
                    first += count
                    print(f"{server.name}, {tokens} tokens: {count / spent:.1f} requests per second", flush=True)
    return taken


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    end_on_sigterm()
    machine = f"{len(os.sched_getaffinity(0))} cores"
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        directory = Path(name)
        size = SMALL if options.quick else SIZE
        print(f"{write_model(directory / 'model', (LengthClass(1.0, 110),), **size)} parameters")
        vocabulary = int(json.loads((directory / "model" / "config.json").read_text())["vocab_size"])
        counts = {128: CONCURRENT, 16: CONCURRENT} if options.quick else {128: 4 * CONCURRENT, 16: 16 * CONCURRENT}
        taken = compare(directory, counts, 1 if options.quick else options.rounds, vocabulary)
    return finish(rows_of(taken, counts, machine), options)


if __name__ == "__main__":
    sys.exit(main())
