"""The account of early log-probs: short portions that leave nothing out, and values that reach their owner once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS
from megarl.queue.trajectory import SampleTag, sample_key
from megarl.run.early_logprobs import EarlyLedger, MessageEntry, Portion, packed, size_of, unpacked

BOTH = (OLD_LOGPROBS, REFERENCE_LOGPROBS)
PROMPT = 3


def tag(group: int, index: int = 0, tokens: int = 4) -> SampleTag:
    return SampleTag(sample_key(group, index), group, index, PROMPT, tokens, tokens, 0, "stop", 1.0, {}, "ok")


def portions(ledger: EarlyLedger, wanted: list[SampleTag], replicas: int, limit: int) -> Iterator[Portion]:
    """All portions until nothing is missing, each computed before the next is asked for."""
    while (portion := ledger.next_portion(wanted, replicas, limit)) is not None:
        yield portion
        ledger.note_computed(portion)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(lengths=LENGTHS, replicas=st.integers(1, 3), limit=st.integers(1, 60), streams=st.sampled_from([BOTH, BOTH[1:]]))
def test_portions_are_short_and_compute_everything_once(
    lengths: list[int], replicas: int, limit: int, streams: tuple[str, ...]
) -> None:
    tags = {sample_key(group, 0): tag(group, tokens=tokens) for group, tokens in enumerate(lengths)}
    ledger, computed = EarlyLedger(streams), Counter[tuple[str, str]]()
    ledger.begin(0)
    wanted = ledger.note_upcoming(range(len(tags)), tags.values())
    for portion in portions(ledger, wanted, replicas, limit):
        keys = [key for part in portion.parts for key in part]
        tokens = sum(tags[key].total_tokens * len(portion.missing[key]) for key in keys)
        assert len(portion.parts) == replicas and keys and (tokens <= limit or len(keys) == 1)
        for stream in streams:
            own = [portion.part(stream, replica) for replica in range(replicas)]
            assert own == portion.parts and portion.needs(stream)
            computed.update((stream, key) for part in own for key in part)
    assert computed == Counter({(stream, key): 1 for stream in streams for key in tags})


def test_the_groups_that_the_batch_takes_first_are_computed_first() -> None:
    ledger = EarlyLedger(BOTH)
    ledger.begin(0)
    wanted = ledger.note_upcoming([5, 2, 9], [tag(group) for group in (9, 5, 2)])
    assert [each.group_id for each in wanted] == [5, 2, 9]
    assert ledger.next_portion(wanted, 1, 2 * 2 * (PROMPT + 4)) == Portion(
        [["5:0", "2:0"]], {"5:0": list(BOTH), "2:0": list(BOTH)}
    )


def test_a_short_portion_is_worth_a_pass_only_if_no_further_sample_fits() -> None:
    """A sample that does not fit now does not fit later either, so waiting for more would never end."""
    both = 2 * (PROMPT + 4)  # tokens of one sample in two passes
    ledger = EarlyLedger(BOTH)
    ledger.begin(0)
    long = ledger.note_upcoming([0, 1], [tag(0), tag(1, tokens=40)])
    first = ledger.next_portion(long, 1, limit=60, least=30)
    assert first is not None and first.parts == [["0:0"]]
    few = ledger.note_upcoming([2, 3], [tag(2), tag(3)])
    assert ledger.next_portion(few, 1, limit=60, least=2 * both + 1) is None
    enough = ledger.next_portion(few, 1, limit=60, least=2 * both)
    assert enough is not None and enough.parts == [["2:0", "3:0"]]
    assert ledger.next_portion([], 1, limit=60) is None


def computed(ledger: EarlyLedger, version: int, groups: list[int]) -> None:
    """Let two replicas compute everything of `groups`."""
    ledger.begin(version)
    wanted = ledger.note_upcoming(groups, [tag(group) for group in ledger.unknown(groups)])
    for _ in portions(ledger, wanted, 2, 40):
        pass


def test_old_log_probs_are_forgotten_with_their_weights_and_those_of_the_reference_with_their_batch() -> None:
    ledger, keys = EarlyLedger(BOTH), ["0:0", "1:0", "2:0"]
    computed(ledger, 4, [0, 1, 2])
    assert ledger.held(OLD_LOGPROBS, keys) == ledger.held(REFERENCE_LOGPROBS, keys) == keys
    assert ledger.settle([0, 1, 7]) == [(REFERENCE_LOGPROBS, "2:0")]  # 7 was never seen
    assert ledger.upcoming == [] and ledger.unknown([0, 1, 2, 7]) == [0, 1, 7]
    ledger.begin(5)
    wanted = ledger.note_upcoming([2], [])
    portion = ledger.next_portion(wanted, 2, 40)
    assert portion is not None and portion.missing == {"2:0": [OLD_LOGPROBS]} and not portion.needs(REFERENCE_LOGPROBS)


def test_log_probs_of_other_weights_are_forgotten_even_if_no_batch_was_taken() -> None:
    ledger = EarlyLedger(BOTH)
    computed(ledger, 4, [0])
    ledger.begin(4)
    assert ledger.held(OLD_LOGPROBS, ["0:0"]) == ["0:0"]
    ledger.begin(5)
    assert ledger.held(OLD_LOGPROBS, ["0:0"]) == [] and ledger.held(REFERENCE_LOGPROBS, ["0:0"]) == ["0:0"]


@given(batches=st.lists(st.sets(st.integers(0, 9), max_size=4), max_size=6))
def test_the_ledger_holds_no_more_than_what_no_batch_has_taken(batches: list[set[int]]) -> None:
    ledger = EarlyLedger(BOTH)
    present: set[int] = set()
    for version, taken in enumerate(batches):
        seen = sorted({(version + offset) % 10 for offset in range(4)})
        computed(ledger, version, seen)
        present = (present | set(seen)) - taken
        held = ledger.settle(taken)
        assert held == [(REFERENCE_LOGPROBS, key) for _, key in held]
        assert {int(key.split(":")[0]) for _, key in held} == present
        assert set(range(10)) - set(ledger.unknown(range(10))) == present


@st.composite
def settled(draw: st.DrawFn) -> tuple[int, EarlyLedger, dict[str, int], dict[str, int]]:
    """Replicas that hold log-probs of some samples, and the owners and lengths of those that a step trains."""
    replicas, lengths = draw(st.integers(1, 3)), draw(LENGTHS)
    tags = [tag(group, tokens=tokens) for group, tokens in enumerate(lengths)]
    ledger = EarlyLedger(BOTH)
    ledger.begin(7)
    early = ledger.note_upcoming(draw(st.lists(st.integers(0, len(tags) - 1), unique=True)), tags)
    for _ in portions(ledger, early, replicas, draw(st.integers(1, 60))):
        if draw(st.integers(0, 3)) == 0:
            break
    trained = draw(st.lists(st.sampled_from(tags), unique_by=lambda each: each.key))
    owners = {each.key: draw(st.integers(0, replicas - 1)) for each in trained}
    return replicas, ledger, owners, {each.key: each.response_tokens for each in tags}


def value_of(entry: MessageEntry) -> torch.Tensor:
    return torch.arange(entry.length) + 100.0 * int(entry.key.split(":")[0]) + 0.5 * (entry.stream == OLD_LOGPROBS)


@given(settled())
def test_each_value_goes_once_to_the_replica_that_trains_the_sample(
    state: tuple[int, EarlyLedger, dict[str, int], dict[str, int]],
) -> None:
    """Every rank computes the same messages, so both sides of each know its length; nothing else is sent."""
    replicas, ledger, owners, lengths = state
    messages = ledger.messages(owners, lengths, replicas)
    arrived = Counter[tuple[str, str]]()
    for sender in range(replicas):
        for receiver in range(replicas):
            entries = messages[sender][receiver]
            own = {stream: {e.key: value_of(e) for e in entries if e.stream == stream} for stream in BOTH}
            message = packed(entries, own, 7)
            assert message.shape == (size_of(entries),)
            for (stream, key), values in unpacked(entries, message, 7).items():
                assert owners[key] == receiver
                assert torch.equal(values, value_of(MessageEntry(stream, key, lengths[key])))
                arrived[stream, key] += 1
    expected = {(stream, key) for stream in BOTH for key in ledger.held(stream, owners)}
    assert arrived == Counter(dict.fromkeys(expected, 1))


def test_values_arrive_bit_for_bit() -> None:
    entry = MessageEntry(OLD_LOGPROBS, "0:0", 5)
    values = torch.tensor([float("nan"), -0.0, 1e-45, float("-inf"), -1.2345678])
    [(name, got)] = unpacked([entry], packed([entry], {OLD_LOGPROBS: {"0:0": values}}, 1), 1).items()
    assert name == (OLD_LOGPROBS, "0:0") and torch.equal(got.view(torch.int32), values.view(torch.int32))


def test_mistakes_are_refused_by_the_receiver_and_by_the_sender() -> None:
    entry = MessageEntry(OLD_LOGPROBS, "3:1", 4)
    message = packed([entry], {OLD_LOGPROBS: {"3:1": torch.zeros(4)}}, 6)
    others = [entry._replace(key="1:3"), entry._replace(stream=REFERENCE_LOGPROBS)]
    for expected, version in [(entry, 7), *((other, 6) for other in others)]:
        with pytest.raises(ValueError, match=f"sample {expected.key}: .* under version {version}; this is a bug"):
            unpacked([expected], message, version)
    with pytest.raises(ValueError, match="has 5 numbers instead of 6"):
        unpacked([entry._replace(length=5)], message, 6)
    with pytest.raises(ValueError, match=r"sample 3:1: \(3,\) old_logprobs .* but the response has 4 tokens"):
        packed([entry], {OLD_LOGPROBS: {"3:1": torch.zeros(3)}}, 6)
    with pytest.raises(ValueError, match=r"torch.float64"):
        packed([entry], {OLD_LOGPROBS: {"3:1": torch.zeros(4, dtype=torch.float64)}}, 6)


def test_tags_are_those_of_all_samples_of_a_group() -> None:
    ledger = EarlyLedger(BOTH)
    ledger.begin(0)
    tags = [replace(tag(1, index), reward=float(index)) for index in range(3)]
    assert ledger.note_upcoming([1], tags) == tags and ledger.unknown([1, 2]) == [2]


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_log_probs_of_a_reference_are_forgotten_when_it_takes_other_weights(refreshes: list[bool]) -> None:
    """Old log-probs depend on the policy's weights alone, and those of the reference on its own."""
    ledger, step = EarlyLedger(BOTH), 0
    for version, refreshed in enumerate(refreshes):
        step += 2 * refreshed
        ledger.begin(version, step)
        expected = [] if refreshed or version == 0 else ["0:0"]
        assert ledger.held(REFERENCE_LOGPROBS, ["0:0"]) == expected and ledger.held(OLD_LOGPROBS, ["0:0"]) == []
        for portion in portions(ledger, ledger.note_upcoming([0], [tag(0)] if version == 0 else []), 1, 100):
            assert portion.needs(REFERENCE_LOGPROBS) is not bool(expected)
        ledger.begin(version, step)
        assert ledger.held(REFERENCE_LOGPROBS, ["0:0"]) == ledger.held(OLD_LOGPROBS, ["0:0"]) == ["0:0"]


def test_a_pass_over_some_data_sets_leaves_out_the_samples_of_the_others() -> None:
    ledger = EarlyLedger([OLD_LOGPROBS, "teacher@a", "teacher@b"], {"teacher@a": {"math"}, "teacher@b": {"code"}})
    ledger.begin(0)
    tags = [replace(tag(group), dataset=name) for group, name in enumerate(["math", "code", "chat"])]
    wanted = ledger.note_upcoming([0, 1, 2], tags)
    (portion,) = portions(ledger, wanted, 1, 1000)
    assert portion.part("teacher@a", 0) == ["0:0"] and portion.part("teacher@b", 0) == ["1:0"]
    assert portion.part(OLD_LOGPROBS, 0) == ["0:0", "1:0", "2:0"]
    assert ledger.held("teacher@a", ["0:0", "1:0", "2:0"]) == ["0:0"]
    assert [ledger.concerns("teacher@b", each) for each in tags] == [False, True, False]
