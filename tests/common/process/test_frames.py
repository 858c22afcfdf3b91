"""Messages over a socket, and answers as JSON."""

import asyncio
import json
import math
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.process.child_process import AnswerError
from megarl.common.process.frames import FrameError, framed, read_frame, receive_frame, send_frame
from megarl.rewards.process import MAX_ANSWER_BYTES, decode_answer, encode_answer
from megarl.rewards.types import RewardResult

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_of_any_size_arrive_in_order(pair: Pair) -> None:
    payloads = [b"", b"x", b"y" * 5_000_000, b"z"]
    sender = threading.Thread(target=lambda: [send_frame(pair[0], each, 10.0) for each in payloads])
    sender.start()
    assert [receive_frame(pair[1], 1 << 23, 10.0) for _ in payloads] == payloads
    sender.join()


def test_a_message_that_is_too_long_is_refused_before_it_is_read(pair: Pair) -> None:
    pair[0].sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="4294967295 bytes, with a limit of 100"):
        receive_frame(pair[1], 100, 10.0)


def test_a_peer_that_sends_byte_by_byte_has_no_more_time_than_others(pair: Pair) -> None:
    ended = threading.Event()

    def trickle() -> None:
        pair[0].sendall(b"\x00\x00\x10\x00")
        while not ended.wait(0.02):
            pair[0].send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        receive_frame(pair[1], 1 << 16, 0.2)
    ended.set()
    thread.join()


def test_the_end_of_the_peer_is_seen_and_a_peer_that_reads_nothing_is_not_waited_for(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        send_frame(pair[0], b"x" * 50_000_000, 0.1)
    pair[0].close()
    with pytest.raises(EOFError):  # in the middle of the message
        receive_frame(pair[1], 1 << 30, 10.0)
    with pytest.raises(EOFError):
        receive_frame(pair[1], 10, 10.0)


texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
scores = st.floats(allow_nan=False, allow_infinity=False)
results = st.builds(RewardResult, scores, st.dictionaries(texts, numbers, max_size=3), st.none() | texts,
                    st.lists(scores, max_size=3).map(tuple))  # fmt: skip


@given(st.integers(0, 1 << 40), results)
def test_a_result_arrives_exactly(task: int, result: RewardResult) -> None:
    assert decode_answer(encode_answer(task, result), task) == result


def test_frames_from_a_stream_are_those_from_a_socket() -> None:
    async def read(*sent: bytes, limit: int = 100) -> list[bytes]:
        reader = asyncio.StreamReader()
        for each in sent:
            reader.feed_data(each)
        reader.feed_eof()
        return [await read_frame(reader, limit) for _ in sent]

    assert asyncio.run(read(framed(b"one"), framed(b""), framed(b"x" * 100))) == [b"one", b"", b"x" * 100]
    with pytest.raises(FrameError, match="a message of 101 bytes, with a limit of 100"):
        asyncio.run(read(framed(b"x" * 101)))
    for cut in (framed(b"abc")[:-1], framed(b"abc")[:2]):
        with pytest.raises(EOFError):
            asyncio.run(read(cut))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, b"same")
        assert theirs.recv(100) == framed(b"same")


def test_a_component_that_is_no_number_arrives() -> None:
    answer = decode_answer(encode_answer(1, RewardResult(1.0, {"a": math.nan})), 1)
    assert math.isnan(answer.components["a"])


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x80\x04.",  # pickle
        b"[]",
        b"{}",
        b'[8, {"score": 1.0}]',
        b'["7", {"score": 1.0}]',
        b'[7, {"score": "1.0"}]',
        b'[7, {"score": null}]',
        b'[7, {"score": NaN}]',
        b'[7, {"score": -Infinity}]',
        b'[7, {"score": 1e999}]',
        b'[7, {"score": 1.0, "turn_rewards": [NaN]}]',
        b'[7, {"score": 1.0, "turn_rewards": ["1"]}]',
        b"[7, null]",
        b'[7, {"score": 1.0, "reason": "crash"}]',
        b'[7, {"score": 1.0, "error": "late"}]',
        b'[7, {"score": 0.0, "error": "late", "reason": "bored"}]',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_answer_to_the_sample_is_refused(encoded: bytes) -> None:
    with pytest.raises(AnswerError):
        decode_answer(encoded, 7)


def test_an_answer_that_is_too_long_becomes_one_that_says_so() -> None:
    encoded = encode_answer(7, RewardResult(1.0, answer="x" * MAX_ANSWER_BYTES))
    answer = decode_answer(encoded, 7)
    assert len(encoded) < 1000 and answer.reason == "invalid" and "return less" in (answer.error or "")
    assert json.loads(encoded)[0] == 7 and answer.answer is None
