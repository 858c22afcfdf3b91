"""Holds tokens of unfinished responses in vLLM's engine process for a moment, to send them together.

vLLM sends one message per engine step, with three small arrays for each response. These cost processor time in the
engine's process and in its front end. megarl reads unfinished responses only every few seconds
(`rollout.report_interval_s`). The end of a response is sent at once, with its held tokens.

The order of messages about one response is kept, and no message has tokens of two weight versions. All held tokens are
sent before the answer to any call of the engine, so after a pause nothing is held.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

VARIABLE = "MEGARL_HOLD_OUTPUTS_S"  # set in the environment of the engines of a run; others send each step's tokens
HOLD_S = 0.2  # the gateway's wait between two pieces of a streamed response


def hold_within(report_interval_s: float) -> float:
    """Return how many seconds an engine may hold outputs, so that unreported tokens are those of one interval.

    Reports are requested that much earlier, because they lack held tokens.
    """
    return min(HOLD_S, report_interval_s / 2)


class HeldOutputs:
    """Holds the outputs of one engine for at most `hold_s` seconds, as long as the engine makes steps."""

    def __init__(self, send: Callable[[Any], None], hold_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """`send`: takes a message for the thread that sends it. Each is (number of a client, EngineCoreOutputs)."""
        self._send, self._hold_s, self._now = send, hold_s, now
        self._held: dict[int, dict[str, list[EngineCoreOutput]]] = {}
        self._last: dict[int, EngineCoreOutputs] = {}  # of each client, a message whose outputs are held
        self._since: float | None = None
        self._lock = threading.Lock()  # a call's answer may come from another thread than the steps

    def put(self, message: tuple[int, EngineCoreOutputs] | bytes) -> None:
        """Send a message, or hold its outputs. Replaces `put_nowait` of the engine's queue."""
        with self._lock:
            if not isinstance(message, tuple) or not _is_step(message[1]):
                self._flush()
                self._send(message)
                return
            client, outputs = message
            last = self._last.get(client)
            if last is not None and last.weight_version != outputs.weight_version:
                self._flush()
            if self._since is None:
                self._since = self._now()
            self._take(client, outputs)
            if self._now() - self._since >= self._hold_s:
                self._flush()

    def _take(self, client: int, outputs: EngineCoreOutputs) -> None:
        """Send outputs that end a response or have more than tokens, and hold the rest."""
        held = self._held.setdefault(client, {})
        due: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            before = held.get(output.request_id)
            if _says_more(output):
                if before is not None:
                    due.append(_join(held.pop(output.request_id)))
                due.append(output)
            elif output.finish_reason is not None:
                due.append(output if before is None else _join([*held.pop(output.request_id), output]))
            elif before is None:
                held[output.request_id] = [output]
            else:
                before.append(output)
        outputs.outputs = due
        self._last[client] = outputs
        if due:
            self._send((client, outputs))
            self._last[client] = _without_outputs(outputs)

    def _flush(self) -> None:
        for client, outputs in self._last.items():
            if held := self._held.pop(client, {}):
                outputs.outputs = [_join(parts) for parts in held.values()]
                self._send((client, outputs))
        self._held, self._last, self._since = {}, {}, None


def _is_step(outputs: EngineCoreOutputs) -> bool:
    """Return whether a message holds nothing but the outputs of a step and the scheduler's numbers."""
    return (
        bool(outputs.outputs)
        and outputs.utility_output is None
        and outputs.finished_requests is None
        and outputs.wave_complete is None
        and outputs.start_wave is None
    )


def _says_more(output: EngineCoreOutput) -> bool:
    """Return whether an output has more than tokens with log-probs and experts, and how they end. It passes at once."""
    return (
        output.events is not None  # with the first token, whose time is that of its message
        or output.new_prompt_logprobs_tensors is not None
        or output.prompt_token_id_logprobs is not None
        or output.pooling_output is not None
        or output.new_sampling_mask is not None
        or output.kv_transfer_params is not None
        or output.ec_transfer_params is not None
        or output.mm_cache_miss_hashes is not None
        or output.trace_headers is not None
        or output.num_nans_in_logits != 0
        or (output.new_logprobs is None) != (not output.new_token_ids)
    )


def _without_outputs(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """Return a message with the same numbers; the other one belongs to the thread that sends it."""
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(
        scheduler_stats=outputs.scheduler_stats, timestamp=outputs.timestamp, weight_version=outputs.weight_version
    )


def _join(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return consecutive outputs of one response as one: the last, with the tokens of all."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return last
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.new_logprobs = _join_logprobs([part.new_logprobs for part in parts if part.new_logprobs is not None])
    last.events = [event for part in parts for event in part.events or ()] or None
    last.prefill_stats = first.prefill_stats
    experts = [part.routed_experts for part in parts if part.routed_experts is not None]
    last.routed_experts = np.concatenate(experts) if experts else None
    return last


def _join_logprobs(parts: list[LogprobsLists]) -> LogprobsLists | None:
    from vllm.v1.outputs import LogprobsLists

    if not parts:
        return None
    ids, logprobs, ranks = (np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3])
    return LogprobsLists(ids, logprobs, ranks, None)


def hold_outputs(hold_s: float) -> None:
    """Patch vLLM 0.32 so that the engine of this process holds its outputs. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc._process_engine_step
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def step(self: EngineCoreProc) -> bool:
        outputs: queue.Queue[Any] = self.output_queue
        if "put_nowait" not in vars(outputs):
            outputs.put_nowait = HeldOutputs(outputs.put_nowait, hold_s).put  # type: ignore[method-assign, assignment]
        return bool(original(self))

    EngineCoreProc._process_engine_step = step
