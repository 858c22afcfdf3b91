"""Token ids that are decoded in one turn of the event loop share one call, in another thread."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from megarl.common.errors import RolloutError
from megarl.rollout.transport.gather import BatchDecoder


class Texts:
    """Joins the numbers of each sequence; notes the calls and their threads."""

    def __init__(self) -> None:
        self.calls: list[list[Sequence[int]]] = []
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        assert self.go.wait(10)
        self.calls.append(list(sequences))
        self.threads.add(threading.get_ident())
        if [13] in sequences:
            raise ValueError("token 13")
        return ["-".join(map(str, ids)) for ids in sequences]


def test_those_of_one_turn_share_a_call_in_another_thread() -> None:
    async def run(texts: Texts) -> list[str]:
        decoder = BatchDecoder(texts, 10.0)
        first = await asyncio.gather(decoder.text([1, 2]), decoder.text([]), decoder.text([3]))
        return [*first, await decoder.text([4])]

    texts = Texts()
    assert asyncio.run(run(texts)) == ["1-2", "", "3", "4"]
    assert texts.calls == [[[1, 2], [], [3]], [[4]]]
    assert threading.get_ident() not in texts.threads


def test_a_failure_reaches_all_of_its_call_and_no_other() -> None:
    async def run() -> list[str | BaseException]:
        decoder = BatchDecoder(Texts(), 10.0)
        failed = await asyncio.gather(decoder.text([13]), decoder.text([1]), return_exceptions=True)
        return [*failed, await decoder.text([2])]

    *failed, later = asyncio.run(run())
    assert [str(error) for error in failed] == ["token 13"] * 2 and later == "2"
    assert all(isinstance(error, ValueError) for error in failed)


async def test_one_that_is_cancelled_does_not_disturb_the_others() -> None:
    texts = Texts()
    texts.go.clear()
    decoder = BatchDecoder(texts, 10.0)
    cancelled, other = (asyncio.create_task(decoder.text([number])) for number in (1, 2))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    texts.go.set()
    assert (await other) == "2"


async def test_a_thread_that_does_not_answer_is_an_error_after_the_bound_that_says_who_waited() -> None:
    texts = Texts()
    texts.go.clear()
    decoder = BatchDecoder(texts, 0.05)
    message = r"a response of 3 tokens waited 0.05 s \(timeouts.rpc_s\) for a thread of the controller to decode it"
    try:
        with pytest.raises(RolloutError, match=message):
            await decoder.text([1, 2, 3])
    finally:
        texts.go.set()
