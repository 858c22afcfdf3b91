"""The end of a sync reaches every member by one request each, and a stuck member still says what it does."""

import threading

import pytest

from megarl.common.errors import PeerTimeout
from megarl.weights.group.stage import Answer, MemberProgress, StageWatch, answer_key, end_key
from megarl.weights.group.store import SyncStore


def test_the_result_ends_the_wait_without_an_answer() -> None:
    server = SyncStore("127.0.0.1", 0, server=True)
    watch = StageWatch(server.connection(), "s0", MemberProgress("m"), "m", 30.0)
    assert watch.wait(0.05) is None and watch.abort_reason is None
    server.put_once(end_key("s0"), {"status": "published"})
    assert watch.wait(20.0) == {"status": "published"}
    watch.join()
    assert watch.abort_reason is None and server.get(answer_key("s0", "m")) is None


def test_after_an_abort_a_member_answers_although_its_own_thread_is_stuck() -> None:
    server = SyncStore("127.0.0.1", 0, server=True)
    progress = MemberProgress("m")
    progress.enter(3)
    progress.wait("the gather of bucket 5", lambda: ("n",))
    watch = StageWatch(server.connection(), "s0", progress, "m", 30.0)
    server.put_once(end_key("s0"), {"abort": "n failed"})
    assert watch.wait(20.0) == {"abort": "n failed"} and watch.abort_reason == "n failed"
    watch.join()
    answer = Answer(**server.get(answer_key("s0", "m")))
    assert answer == Answer("m", "the gather of bucket 5", ["n"], None, 4, answer.seconds)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_that_cannot_answer_still_learns_of_the_end() -> None:
    def broken() -> tuple[str, ...]:
        raise KeyError("n")

    server = SyncStore("127.0.0.1", 0, server=True)
    progress = MemberProgress("m")
    progress.wait("the gather of bucket 5", broken)
    watch = StageWatch(server.connection(), "s0", progress, "m", 30.0)
    server.put_once(end_key("s0"), {"abort": "n failed"})
    assert watch.wait(20.0) == {"abort": "n failed"}


def test_a_stage_that_goes_on_cannot_be_left_for_the_next_one() -> None:
    server = SyncStore("127.0.0.1", 0, server=True)
    watch = StageWatch(server.connection(), "g0/s0", MemberProgress("m"), "m", 30.0)
    with pytest.raises(PeerTimeout, match=r"^m waited 0 s for trainer rank 0 to end stage g0/s0$"):
        watch.join(0.1)
    server.put_once(end_key("g0/s0"), {"status": "published"})
    watch.join()


def test_the_answer_is_that_of_the_moment_when_the_member_gave_up() -> None:
    progress = MemberProgress("m")
    progress.wait_in_broadcast(2)
    progress.freeze(expired=True)
    progress.work("cleans up")
    answer = progress.answer()
    assert (answer.bucket, answer.doing, answer.expired) == (2, "the broadcast of bucket 3", True)


def test_an_end_that_never_comes_is_an_abort() -> None:
    before = set(threading.enumerate())  # groups of other tests may still wait for their ends
    server = SyncStore("127.0.0.1", 0, server=True)
    watch = StageWatch(server.connection(), "s0", MemberProgress("m"), "m", 0.2)
    end = watch.wait(20.0)
    assert end is not None and "m waited" in end["abort"]
    watch.join()
    assert not [each for each in set(threading.enumerate()) - before if each.name == "weight-sync-watch"]
