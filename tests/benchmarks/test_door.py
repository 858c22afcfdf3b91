"""The door's benchmark: its requests, its rows and their bounds."""

from __future__ import annotations

from benchmarks.door import BOUNDS, CONCURRENT, body_of, rows_of


def test_no_two_requests_share_a_prompt_and_all_ask_for_exactly_the_tokens() -> None:
    bodies = [body_of(number, 16, 40) for number in range(300)]
    assert len({tuple(body["token_ids"]) for body in bodies}) == 300
    assert body_of(7, 16, 40) == bodies[7]
    assert all(4 <= token < 40 for body in bodies for token in body["token_ids"])
    assert bodies[0]["sampling_params"]["max_tokens"] == 16 and bodies[0]["sampling_params"]["ignore_eos"]


def test_the_rows_compare_medians() -> None:
    taken = {
        ("the door", 128): [11.0, 10.0, 99.0], ("vLLM's server", 128): [10.0, 10.0, 1.0],
        ("the door", 16): [4.0], ("vLLM's server", 16): [2.0],
    }  # fmt: skip
    long, short = rows_of(taken, {128: 256, 16: 1024}, "2 cores")
    assert (long.ratio, long.bound, long.ok) == (1.1, BOUNDS[128], True)
    assert (short.ratio, short.bound, short.ok) == (2.0, BOUNDS[16], False)
    assert str(CONCURRENT) in long.name and long.details["requests"] == 256
