"""A response that several engines make in turn: nothing is lost, doubled or sampled twice."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.routes import Routes
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec, continuation_seed, request_seed
from megarl.rollout.engine.response_parts import (
    ResponsePart,
    continue_request,
    first_tokens,
    join_parts,
    tokens_end,
    tokens_from,
)

REQUEST = GenerateRequest("r", [1, 2], SamplingSpec(6, 0.7, (9,), top_p=0.8), seed=11)


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    """The spans of tokens with these versions."""
    bounds = [at for at in range(len(versions) + 1) if at in {0, len(versions)} or versions[at - 1] != versions[at]]
    return tuple(VersionSpan(versions[start], start, end) for start, end in pairwise(bounds))


def part(ids: list[int], versions: list[int]) -> ResponsePart:
    return ResponsePart(ids, [-0.5 * token for token in ids], spans_of(versions))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=12), st.data())
def test_parts_join_to_the_response_that_they_were_cut_from(tokens: list[tuple[int, int]], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    ids, versions = [token for token, _ in tokens], [version for _, version in tokens]
    joined = ResponsePart()
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        joined = join_parts(joined, part(ids[start:end], versions[start:end]))
    assert joined == part(ids, versions)


def test_the_end_and_the_time_are_those_of_the_last_part() -> None:
    first, second = replace(part([1], [0]), seconds=2.0), replace(part([], []), finish_reason="stop", seconds=3.0)
    assert join_parts(first, second) == replace(first, finish_reason="stop", seconds=3.0)
    with pytest.raises(ValueError, match=r"has ended \(stop\) cannot be continued"):
        join_parts(second, first)
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        ResponsePart([1, 2], [0.0])


def test_the_experts_of_parts_are_those_of_the_whole_response() -> None:
    """The first part brings those of the prompt, and no part those of its last token."""
    whole = Routes(np.arange(12, dtype=np.uint8).reshape(6, 1, 2))  # of 2 prompt and 5 response tokens
    one = replace(part([1, 2], [0, 0]), routes=whole.of(0, 3))
    two = replace(part([3, 4, 5], [0, 0, 0]), routes=whole.of(3))
    both = join_parts(one, two)
    assert both == replace(part([1, 2, 3, 4, 5], [0] * 5), routes=whole)
    assert continue_request(replace(REQUEST, routes_from=0), one).routes_from == 3 == len(REQUEST.prompt_ids) + 1
    assert continue_request(REQUEST, one).routes_from is None
    assert tokens_from(both, 2) == two
    assert first_tokens(both, 2, "stop") == replace(one, finish_reason="stop")
    assert join_parts(ResponsePart(), both) == both == join_parts(both, ResponsePart())


@given(st.integers(0, 5))
def test_a_continuation_asks_for_exactly_the_missing_tokens(count: int) -> None:
    so_far = part([3] * count, [0] * count)
    again = continue_request(REQUEST, so_far)
    assert again.prompt_ids == [1, 2] + [3] * count
    assert again.sampling == replace(REQUEST.sampling, max_tokens=6 - count)
    assert again.request_id == "r"
    assert again.seed == (continuation_seed(11, count) if count else 11)


def test_a_response_without_tokens_is_asked_for_as_before() -> None:
    """A lost engine that has reported nothing changes no result."""
    assert continue_request(REQUEST, ResponsePart(seconds=3.0)) is REQUEST
    assert continue_request(replace(REQUEST, seed=None), part([3], [0])).seed is None


@pytest.mark.parametrize(("ids", "end"), [([9], "stop"), ([3] * 6, "length"), ([3] * 5 + [9], "stop"), ([9, 3], None)])
def test_nothing_follows_a_stop_token_or_the_last_token_allowed(ids: list[int], end: str | None) -> None:
    so_far = part(ids, [0] * len(ids))
    assert tokens_end(REQUEST, so_far) == end
    if end is not None:
        with pytest.raises(ValueError, match=rf"the tokens of request r end the response \({end}\)"):
            continue_request(REQUEST, so_far)


def test_seeds_of_continuations_depend_on_everything_that_tells_them_apart() -> None:
    places = list(product(range(2), range(3), range(3), range(2), range(1, 5)))
    seeds = {continuation_seed(request_seed(run, group, sample, turn), at) for run, group, sample, turn, at in places}
    seeds |= {request_seed(run, group, sample, turn) for run, group, sample, turn, _ in places}
    assert len(seeds) == len(places) * 5 // 4 and all(0 <= seed < 1 << 63 for seed in seeds)
