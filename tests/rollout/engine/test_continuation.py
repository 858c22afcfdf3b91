"""The responses of one call, while replicas come and go."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.continuation import MOST_ATTEMPTS, ResponseCollector
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart

STOP, LIMIT = 0, 7


def truth(name: int, position: int) -> int:
    """The token that every replica makes at a position of a response."""
    return random.Random(f"{name}/{position}").randrange(0, 5)


class Replica:
    """Makes the true tokens of its requests. Its version is its index, which tells who made a token."""

    def __init__(self, index: int, requests: list[GenerateRequest]) -> None:
        self.index = index
        self.requests = {request.request_id: request for request in requests}
        self.made: dict[str, list[int]] = {name: [] for name in self.requests}

    def work(self, name: str) -> None:
        request, made = self.requests[name], self.made[name]
        if not (made and made[-1] == STOP) and len(made) < request.sampling.max_tokens:
            made.append(truth(int(name), len(request.prompt_ids) - 1 + len(made)))

    def report(self, name: str, known: int, *, tell_end: bool) -> ResponsePart:
        request, made = self.requests[name], self.made[name]
        new = made[known:]
        end = None
        if made and made[-1] == STOP:
            end = "stop"
        elif len(made) == request.sampling.max_tokens:
            end = "length"
        spans = (VersionSpan(self.index, 0, len(new)),) if new else ()
        return ResponsePart(new, [float(self.index)] * len(new), spans, end if tell_end else None, 1.0)


def test_tokens_of_before_are_continued_and_kept_up_to_date() -> None:
    """One whose tokens end it by themselves has ended, although nobody has said so."""
    requests = [GenerateRequest(name, [42], SamplingSpec(LIMIT, 1.0, (STOP,)), 5) for name in "abc"]
    spans = (VersionSpan(3, 0, 2, lost=1),)
    tokens = {
        "a": ResponsePart([1, 2], [-0.1, -0.2], spans, seconds=9.0),
        "b": ResponsePart([3, STOP], [-0.1, -0.2], spans),
    }
    responses = ResponseCollector(requests, tokens)
    assert responses.unfinished == ["a", "c"] and responses.tokens == 2
    sent = responses.send(4)
    assert [request.prompt_ids for request in sent] == [[42, 1, 2], [42]] and responses.reported == {"a": 0, "c": 0}
    last = ResponsePart([STOP], [-0.3], (VersionSpan(7, 0, 1),), "stop", 1.0)
    assert responses.add({"a": last, "c": last}) == 2
    assert {name: part.response_ids for name, part in tokens.items()} == {
        "a": [1, 2, STOP],
        "b": [3, STOP],
        "c": [STOP],
    }
    first, second, third = responses.results()
    assert first.versions == (*spans, VersionSpan(7, 2, 3)) and first.logprobs == [-0.1, -0.2, -0.3]
    assert (first.seconds, second.seconds, third.seconds) == (1.0, 0.0, 1.0)
    assert second.finish_reason == "stop" and second.versions == spans


@given(st.data())
def test_any_sequence_of_replicas_gives_every_token_once(data: st.DataObject) -> None:
    """Each replica works and reports as it likes, and is lost at any point, also before it tells of an end.

    A response fails exactly if `MOST_ATTEMPTS` replicas in a row are lost without a token of it.
    """
    names = [str(i) for i in range(data.draw(st.integers(1, 3)))]
    responses = ResponseCollector([GenerateRequest(name, [42], SamplingSpec(LIMIT, 1.0, (STOP,)), 5) for name in names])
    makers: dict[str, list[int]] = {name: [] for name in names}
    in_vain = dict.fromkeys(names, 0)
    given_up: set[str] = set()
    index = 0
    while responses.unfinished:
        replica = Replica(index, responses.send(index))
        last = index == 4
        for _ in range(100 if last else data.draw(st.integers(0, 3))):
            for name in list(responses.unfinished):
                for _ in range(data.draw(st.integers(0, 2)) if not last else 1):
                    replica.work(name)
            tell_end = last or data.draw(st.booleans())
            reports = {
                name: replica.report(name, known, tell_end=tell_end) for name, known in responses.reported.items()
            }
            for name, part in reports.items():
                makers[name] += [index] * len(part.response_ids)
            ended = responses.add(reports)
            assert ended == sum(part.finish_reason is not None for part in reports.values())
        if unfinished := responses.unfinished:
            for name in unfinished:
                in_vain[name] = 0 if index in makers[name] else in_vain[name] + 1
            given_up |= {name for name in unfinished if in_vain[name] == MOST_ATTEMPTS}
            responses.interrupt()
        index += 1
    for name, result in zip(names, responses.results(), strict=True):
        whole = [truth(int(name), position) for position in range(LIMIT)]
        whole = whole[: whole.index(STOP) + 1] if STOP in whole else whole
        assert result.request_id == name and result.response_ids == whole[: len(result.response_ids)]
        assert bool(result.failure) == (name in given_up) == (result.finish_reason == "abort")
        if name not in given_up:
            assert result.response_ids == whole
            assert result.finish_reason == ("stop" if STOP in whole else "length")
        versions = [span.version for span in result.versions for _ in range(span.start, span.end)]
        assert versions == makers[name] == result.logprobs
        starts = [0, *(span.end for span in result.versions)]
        assert [span.start for span in result.versions] == starts[:-1]


def test_what_is_cut_is_truncated_and_what_had_ended_is_not() -> None:
    spec = SamplingSpec(LIMIT, 1.0, (STOP,))
    responses = ResponseCollector([GenerateRequest(name, [1], spec) for name in "abc"])
    responses.send(0)
    spans = (VersionSpan(0, 0, 1),)
    responses.add({"a": ResponsePart([3], [-1.0], spans), "b": ResponsePart([0], [-2.0], spans, "stop")})
    assert responses.unfinished == ["a", "c"] and responses.tokens == 1
    with pytest.raises(ValueError, match="response to a has not ended"):
        responses.results()
    assert responses.add_last({"a": ResponsePart([4], [-1.0], spans, "abort"), "c": ResponsePart()}) == 0
    responses.cut()
    ended = [(each.response_ids, each.finish_reason, each.cut) for each in responses.results()]
    assert ended == [([3, 4], "length", True), ([0], "stop", False), ([], "length", True)]


def test_what_a_replica_was_told_to_end_can_have_ended_by_itself() -> None:
    responses = ResponseCollector([GenerateRequest(name, [1], SamplingSpec(LIMIT, 1.0, (STOP,))) for name in "ab"])
    responses.send(0)
    last = ResponsePart([0], [-1.0], (VersionSpan(0, 0, 1),), "stop")
    assert responses.add_last({"a": last, "b": replace(last, response_ids=[3], finish_reason="abort")}) == 1
    assert responses.unfinished == ["b"] and len(responses) == 2


def test_ids_must_differ() -> None:
    with pytest.raises(ValueError, match="same id"):
        ResponseCollector([GenerateRequest("a", [1], SamplingSpec(4, 1.0, ()))] * 2)


def test_only_losses_in_a_row_without_a_token_count_as_attempts() -> None:
    """A long response may outlive any number of engines, as long as each of them brings it further."""
    responses = ResponseCollector([GenerateRequest("x", [42], SamplingSpec(99, 1.0, (STOP,)))])
    for index in range(3 * MOST_ATTEMPTS):
        responses.send(index)
        if index % MOST_ATTEMPTS == 0:
            responses.add({"x": ResponsePart([1], [-0.5], (VersionSpan(0, 0, 1),))})
        responses.interrupt()
        assert responses.unfinished == ["x"]
    responses.send(99)
    responses.interrupt()
    [result] = responses.results()
    assert (result.finish_reason, result.response_ids) == (
        "abort",
        [1, 1, 1],
    ) and "3 replicas in a row" in result.failure
