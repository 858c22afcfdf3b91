"""Outputs that the engine's process holds: complete, in order, with the right version, and never for long."""

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from megarl.common.process import held_outputs
from megarl.common.process.held_outputs import HeldOutputs

Sent = list[Any]


def output(name: str, *tokens: int, end: FinishReason | None = None, **more: Any) -> EngineCoreOutput:
    """An output whose log-probs are minus the tokens."""
    ids = np.array(tokens, np.int32)[:, None]
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0] + 1) if tokens else None
    return EngineCoreOutput(name, list(tokens), new_logprobs=logprobs, finish_reason=end, **more)


def step(*outputs: EngineCoreOutput, version: str = "1", running: int = 1) -> tuple[int, EngineCoreOutputs]:
    stats = SchedulerStats(num_running_reqs=running)
    return 0, EngineCoreOutputs(outputs=list(outputs), weight_version=version, scheduler_stats=stats)


def answer() -> tuple[int, EngineCoreOutputs]:
    return 0, EngineCoreOutputs(utility_output=UtilityOutput(7))


def holding(now: Any = lambda: 0.0) -> tuple[HeldOutputs, Sent]:
    sent: Sent = []
    return HeldOutputs(sent.append, 1.0, now), sent


def said(sent: Sent) -> list[list[tuple[str, list[int], bool]]]:
    return [[(o.request_id, o.new_token_ids, o.finished) for o in message.outputs] for _, message in sent]


def test_what_ends_a_response_goes_at_once_with_what_was_held_of_it() -> None:
    held, sent = holding()
    held.put(step(output("a", 1), output("b", 2), running=2))
    assert not sent
    held.put(step(output("a", 3, end=FinishReason.STOP), output("b", 4)))
    assert said(sent) == [[("a", [1, 3], True)]]
    joined = sent[0][1].outputs[0].new_logprobs
    assert joined.logprobs.tolist() == [[-1.0], [-3.0]] and joined.logprob_token_ids.tolist() == [[1], [3]]
    assert joined.sampled_token_ranks.tolist() == [2, 4] and sent[0][1].scheduler_stats.num_running_reqs == 1
    held.put(answer())
    assert said(sent)[1:] == [[("b", [2, 4], False)], []]
    assert sent[1][1] is not sent[0][1]  # the first message may not have been packed yet


def test_nothing_is_held_for_longer_than_allowed_while_the_engine_makes_steps() -> None:
    clock = [0.0]
    held, sent = holding(lambda: clock[0])
    for at in (5.0, 5.9, 6.0, 6.5, 7.5):
        clock[0] = at
        held.put(step(output("a", int(10 * at))))
    assert said(sent) == [[("a", [50, 59, 60], False)], [("a", [65, 75], False)]]


def test_no_message_has_tokens_of_two_versions() -> None:
    held, sent = holding()
    held.put(step(output("a", 1), version="1"))
    held.put(step(output("a", 2), version="2"))
    held.put(answer())
    assert [(message.weight_version, said([(0, message)])[0]) for _, message in sent[:2]] == [
        ("1", [("a", [1], False)]),
        ("2", [("a", [2], False)]),
    ]


def test_what_the_first_output_of_a_response_says_is_kept() -> None:
    held, sent = holding()
    prefill = PrefillStats(num_prompt_tokens=5)
    held.put(step(output("a", 1, prefill_stats=prefill)))
    held.put(step(output("a", 2, end=FinishReason.LENGTH, stop_reason=9)))
    (joined,) = sent[0][1].outputs
    assert joined.prefill_stats is prefill and joined.stop_reason == 9 and joined.finish_reason == FinishReason.LENGTH


def test_the_experts_of_what_was_held_follow_each_other() -> None:
    held, sent = holding()
    prompt, first, second = (np.full((rows, 2, 2), rows, np.uint8) for rows in (5, 1, 2))
    held.put(step(output("a", 1, routed_experts=prompt)))
    held.put(step(output("a", 2, routed_experts=first), output("b", 9)))
    held.put(step(output("a", 3, routed_experts=second, end=FinishReason.STOP)))
    assert said(sent) == [[("a", [1, 2, 3], True)]]
    assert np.array_equal(sent[0][1].outputs[0].routed_experts, np.concatenate([prompt, first, second]))
    held.put(answer())
    assert sent[1][1].outputs[0].routed_experts is None


@pytest.mark.parametrize(
    "more",
    [{"trace_headers": {"a": "1"}}, {"kv_transfer_params": {"a": 1}}, {"num_nans_in_logits": 3}],
)
def test_an_output_that_says_more_passes_after_what_was_held(more: dict[str, Any]) -> None:
    held, sent = holding()
    held.put(step(output("a", 1), output("b", 9)))
    held.put(step(output("a", 2), output("b", 8)))
    last = output("a", 3, **more)
    held.put(step(last, output("b", 7)))
    assert said(sent) == [[("a", [1, 2], False), ("a", [3], False)]] and sent[0][1].outputs[1] is last
    held.put(answer())
    assert said(sent)[1] == [("b", [9, 8, 7], False)]


def test_every_other_message_passes_as_it_is_and_sends_what_was_held_first() -> None:
    aborted = EngineCoreOutputs(finished_requests={"a"}, outputs=[output("a", end=FinishReason.ABORT)])
    counts = EngineCoreOutputs(scheduler_stats=SchedulerStats())
    for other in (answer(), (-1, counts), b"ENGINE_CORE_DEAD", (0, aborted)):
        held, sent = holding()
        held.put(step(output("a", 1)))
        held.put(other)
        assert said(sent[:1]) == [[("a", [1], False)]] and sent[1] is other and len(sent) == 2


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Steps of an engine: (version, seconds, tokens of each request, those that end), or None for a call's answer."""
    number, version, open_ones = 0, 1, ["r0", "r1", "r2"]
    history: list[Any] = []
    for _ in range(draw(st.integers(1, 25))):
        if draw(st.integers(0, 5)) == 0:
            history.append(None)
            version += draw(st.integers(0, 1))
            continue
        version += draw(st.integers(0, 20)) == 0
        tokens = {name: [number := number + 1 for _ in range(draw(st.integers(1, 2)))] for name in open_ones}
        ends = [name for name in open_ones if draw(st.integers(0, 6)) == 0]
        if tokens:
            history.append((str(version), draw(st.sampled_from([0.0, 0.1, 0.6])), tokens, ends))
        open_ones = [name for name in open_ones if name not in ends]
    return history


def run_history(history: list[Any], put: Any, clock: list[float]) -> dict[str, list[tuple[int, str]]]:
    """Put everything; return the tokens of each request with their versions."""
    expected: dict[str, list[tuple[int, str]]] = {"r0": [], "r1": [], "r2": []}
    for each in history:
        if each is None:
            put(answer())
            continue
        version, seconds, tokens, ends = each
        clock[0] += seconds
        for name, ids in tokens.items():
            expected[name] += [(token, version) for token in ids]
        parts = [output(n, *ids, end=FinishReason.STOP if n in ends else None) for n, ids in tokens.items()]
        put(step(*parts, version=version))
    put(answer())
    return expected


@given(histories())
@settings(deadline=None)
def test_each_token_is_sent_once_in_order_with_its_version(history: list[Any]) -> None:
    clock = [0.0]
    held, sent = holding(lambda: clock[0])
    expected = run_history(history, held.put, clock)
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in expected}
    for _, message in sent:
        for each in message.outputs:
            found[each.request_id] += [(token, message.weight_version) for token in each.new_token_ids]
            assert each.new_logprobs.logprobs[:, 0].tolist() == [-token for token in each.new_token_ids]
    assert found == expected
    assert sum(message.utility_output is not None for _, message in sent) == history.count(None) + 1


def results(history: list[Any], *, hold: bool) -> dict[str, Any]:
    """Return what the front end of vLLM makes of a history: tokens, log-probs, version spans, ends of responses."""
    processor = OutputProcessor(None, log_stats=False)
    collectors = {}
    for name in ("r0", "r1", "r2"):
        parameters = SamplingParams(
            logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, prompt_token_ids=[1], mm_features=None, sampling_params=parameters,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        collectors[name] = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        processor.add_request(request, None, None, 0, collectors[name])
    sent: Sent = []
    clock = [0.0]
    run_history(history, HeldOutputs(sent.append, 1.0, lambda: clock[0]).put if hold else sent.append, clock)
    for _, message in sent:
        processor.process_outputs(message.outputs, message.timestamp, None, weight_version=message.weight_version)
    found: dict[str, Any] = {}
    for name, collector in collectors.items():
        if (last := collector.get_nowait()) is not None:
            part = last.outputs[0]
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            found[name] = (list(part.token_ids), part.logprobs.logprobs, spans, part.finish_reason)
        else:
            state = processor.request_states[name]
            found[name] = (list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs.logprobs)
    return found


@given(histories())
@settings(deadline=None, max_examples=30)
def test_vllms_front_end_makes_the_same_responses_of_it(history: list[Any]) -> None:
    assert results(history, hold=True) == results(history, hold=False)


def test_the_patch_holds_the_outputs_of_an_engine_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter([step(output("a", 1)), step(output("a", 2, end=FinishReason.STOP))])

    def one_step(self: Any) -> bool:
        self.output_queue.put_nowait(next(messages))
        return True

    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", one_step)
    held_outputs.hold_outputs(60.0)
    patched = EngineCoreProc._process_engine_step
    held_outputs.hold_outputs(60.0)
    assert EngineCoreProc._process_engine_step is patched
    core: Any = SimpleNamespace(output_queue=queue.Queue())
    assert patched(core) and core.output_queue.empty()
    assert patched(core)
    assert said([core.output_queue.get_nowait()]) == [[("a", [1, 2], True)]]
