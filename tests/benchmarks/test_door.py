"""The door's benchmark: its requests, its rows and their bounds."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.door import BOUNDS, CHATS, CONCURRENT, SESSIONS, Server, body_of, chat_of, rows_of, sessions_row
from tests.support.checkout import ROOT

SERVES = """
import sys, time
from pathlib import Path
from benchmarks.door import end_on_sigterm, started
end_on_sigterm()
with started([sys.executable, "-c", "import time; time.sleep(300)"], Path(sys.argv[1]), {}) as process:
    print(process.pid, flush=True)
    time.sleep(300)
"""


def test_no_two_requests_share_a_prompt_and_all_ask_for_exactly_the_tokens() -> None:
    bodies = [body_of(number, 16, 40) for number in range(300)]
    assert len({tuple(body["token_ids"]) for body in bodies}) == 300
    assert body_of(7, 16, 40) == bodies[7]
    assert all(4 <= token < 40 for body in bodies for token in body["token_ids"])
    assert bodies[0]["sampling_params"]["max_tokens"] == 16 and bodies[0]["sampling_params"]["ignore_eos"]


def test_sessions_are_named_and_chats_ask_for_as_much() -> None:
    plain = Server("the door", "http://x", "t")
    named = replace(plain, sessions=True, chat=True)
    assert (plain.headers("1-2"), named.headers("1-2")) == ({}, {"X-Session-ID": "1-2"})
    assert (plain.route, named.route) == ("http://x/inference/v1/generate", "http://x/v1/chat/completions")
    answers: tuple[dict[str, Any], ...] = {"choices": [{"token_ids": [5, 6]}]}, {"usage": {"completion_tokens": 2}}
    assert [each.made(answer) for each, answer in zip((plain, named), answers, strict=True)] == [2, 2]
    first, second = (chat_of(number, 16) for number in (1, 2))
    assert first["messages"] != second["messages"] and (first["max_tokens"], first["ignore_eos"]) == (16, True)


def test_the_rows_compare_medians() -> None:
    taken = {
        ("the door", 128): [11.0, 10.0, 99.0], ("vLLM's server", 128): [10.0, 10.0, 1.0],
        ("the door", 16): [4.0], ("vLLM's server", 16): [2.0],
        (SESSIONS, 128): [12.1], (CHATS, 128): [22.0], (SESSIONS, 16): [4.0], (CHATS, 16): [8.0],
    }  # fmt: skip
    long, *others, short, _, _ = rows_of(taken, {128: 256, 16: 1024}, "2 cores")
    assert (long.ratio, long.bound, long.ok) == (1.1, BOUNDS[128], True)
    assert (short.ratio, short.bound, short.ok) == (2.0, BOUNDS[16], False)
    assert [(round(each.ratio, 3), each.bound) for each in others] == [(1.1, None), (2.0, None)]
    assert str(CONCURRENT) in long.name and long.details["requests"] == 256


def test_the_row_of_many_sessions_misses_its_bound_if_one_is_not_whole() -> None:
    seen = {"seconds": 12.34, "most_open": 2000, "latencies": [[1.0] * 1980 + [9.0] * 20, [2.0] * 2000]}
    row = sessions_row(2000, 2000, seen, (100.4, 130.6), "2 cores")
    assert (row.ratio, row.ok, row.details["most requests at once"]) == (1.0, True, 2000)
    assert (
        row.details["first turn, s"].startswith("median 1.00, 99th percentile ")
        and row.details["seconds for all"] == 12.3
    )
    assert row.details["door, MiB before and after"] == [100, 131]
    assert not sessions_row(2000, 1999, seen, (1.0, 1.0), "2 cores").ok


def test_sigterm_ends_its_servers_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVES, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        assert Path(f"/proc/{server}").exists()
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()
