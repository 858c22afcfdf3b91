"""The responses to the requests of one call, as far as engines have reported them, and their deadline. Pure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from megarl.common.errors import RolloutError
from megarl.config.derived.staleness import group_deadline_s
from megarl.config.schema import Config
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.response_parts import ResponsePart, continue_request, join_parts, tokens_end

# A response fails after this many lost engines in a row without a new token. Otherwise a request that kills its engine
# would kill every engine in turn.
MOST_ATTEMPTS = 3


@dataclass
class _Response:
    request: GenerateRequest
    replica: int = -1
    sent_at: int = 0  # tokens it had when it was sent to `replica`
    lost_replicas: int = 0
    lost_seconds: float = 0.0  # engine time on earlier replicas
    lost_queue_s: float = 0.0
    lost_prefill_s: float = 0.0
    attempts: int = 0  # in a row that lost the replica without a new token
    failure: str = ""
    cut: bool = False

    def leave(self, tokens: ResponsePart) -> None:
        """Add up the times of a replica that stops working on it."""
        self.lost_seconds += tokens.seconds
        self.lost_queue_s += tokens.queue_s
        self.lost_prefill_s += tokens.prefill_s


class ResponseCollector:
    """Collects the parts that replicas report.

    For each replica: `send`, any number of `add`, then `interrupt` or `move` if it does not finish all responses.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], tokens: MutableMapping[str, ResponsePart] | None = None
    ) -> None:
        """`tokens`: what responses already have, by request id; it is kept up to date."""
        self._responses = {request.request_id: _Response(request) for request in requests}
        if len(self._responses) != len(requests):
            raise ValueError("several requests of one call have the same id")
        self._tokens: MutableMapping[str, ResponsePart] = {} if tokens is None else tokens
        for request in requests:
            self._begin(request)

    def _begin(self, request: GenerateRequest) -> None:
        begun = self._tokens.get(request.request_id, ResponsePart())
        end = begun.finish_reason or tokens_end(request, begun)
        # Its times are those of an earlier engine.
        self._tokens[request.request_id] = begun.without_times(end)

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests whose responses have not ended, in their order."""
        return [name for name in self._responses if self._tokens[name].finish_reason is None]

    def unfinished_at(self, when: str) -> RolloutError:
        """Return the error of a group with unfinished responses; `when` is part of the message."""
        names = self.unfinished
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return RolloutError(
            f"{len(names)} of {len(self)} responses were unfinished {when}, with {self.tokens} tokens: "
            f"{', '.join(names[:3])}{more}"
        )

    @property
    def tokens(self) -> int:
        """The number of tokens that the unfinished responses have."""
        return sum(len(self._tokens[name].response_ids) for name in self.unfinished)

    def send(self, replica: int) -> list[GenerateRequest]:
        """Return the requests for `replica`: each unfinished one, with its tokens so far."""
        sent = []
        for name in self.unfinished:
            response, tokens = self._responses[name], self._tokens[name]
            response.replica, response.sent_at = replica, len(tokens.response_ids)
            sent.append(continue_request(response.request, tokens))
        return sent

    @property
    def reported(self) -> dict[str, int]:
        """How many tokens of each unfinished request its current replica has reported."""
        responses = self._responses
        return {name: len(self._tokens[name].response_ids) - responses[name].sent_at for name in self.unfinished}

    def progress(self, parts: Mapping[str, ResponsePart]) -> tuple[int, float]:
        """Return the number of tokens of a report that is not yet added, and the seconds that they took.

        Responses without a token are left out: they may wait for a place in the engine.
        """
        tokens, seconds = 0, 0.0
        for name, part in parts.items():
            before = self._tokens[name]
            if part.response_ids or len(before.response_ids) > self._responses[name].sent_at:
                tokens += len(part.response_ids)
                seconds += max(part.seconds - before.seconds, 0.0)
        return tokens, seconds

    def add(self, parts: Mapping[str, ResponsePart]) -> int:
        """Append reported tokens; return how many responses ended. Raises ValueError for one that had already ended."""
        for name, part in parts.items():
            self._tokens[name] = join_parts(self._tokens[name], part)
        return sum(part.finish_reason is not None for part in parts.values())

    def add_last(self, parts: Mapping[str, ResponsePart]) -> int:
        """Append the last tokens of requests that a replica was asked to stop, as `add` does.

        Stopped responses have not ended: they can continue elsewhere, or be cut.
        """
        stopped = [name for name, part in parts.items() if part.finish_reason == "abort"]
        return self.add({**parts, **{name: replace(parts[name], finish_reason=None) for name in stopped}})

    def cut(self) -> None:
        """Truncate the unfinished responses: they end as they are."""
        for name in self.unfinished:
            self._tokens[name] = replace(self._tokens[name], finish_reason="length")
            self._responses[name].cut = True

    def interrupt(self) -> None:
        """Record that the replica of the unfinished responses is lost.

        A response with all its tokens has ended, even if the engine died before reporting the end. A response fails
        after `MOST_ATTEMPTS` lost replicas in a row without a new token.
        """
        for name in self.unfinished:
            response, tokens = self._responses[name], self._tokens[name]
            response.lost_replicas += 1
            response.leave(tokens)
            response.attempts = response.attempts + 1 if len(tokens.response_ids) == response.sent_at else 0
            end = tokens_end(response.request, tokens)
            if end is None and response.attempts >= MOST_ATTEMPTS:
                end = "abort"
                response.failure = f"{response.attempts} replicas in a row were lost before they made a token of it"
            self._tokens[name] = tokens.without_times(end)

    def move(self) -> None:
        """Record that the replica of the unfinished responses is drained, and another one continues them."""
        for name in self.unfinished:
            tokens = self._tokens[name]
            self._responses[name].leave(tokens)
            self._tokens[name] = tokens.without_times(tokens.finish_reason)

    def results(self) -> list[GenerateResult]:
        """Return the responses in the order of the requests. Raises ValueError if one has not ended."""
        return [_result(each, self._tokens[name]) for name, each in self._responses.items()]


def _result(response: _Response, tokens: ResponsePart) -> GenerateResult:
    if tokens.finish_reason is None:
        raise ValueError(f"the response to {response.request.request_id} has not ended")
    return GenerateResult(
        response.request.request_id,
        tokens.response_ids,
        tokens.logprobs,
        tokens.versions,
        tokens.finish_reason,
        response.replica,
        response.lost_seconds + tokens.seconds,
        response.lost_replicas,
        response.cut,
        response.failure,
        response.lost_queue_s + tokens.queue_s,
        response.lost_prefill_s + tokens.prefill_s,
        tokens.routes,
    )


GRACE_S = 60.0  # how long loops may run after the group's deadline, which ends their responses


class GroupDeadline(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The time `at` which a group has run for `seconds`, on the caller's monotonic clock.

    Convert it with `sent` and `received` on its way to another process. `grace_s`: how long the group's loops may still
    run after it.
    """

    at: float
    seconds: float
    policy: Literal["cut", "fail"]
    grace_s: float = GRACE_S

    @classmethod
    def of(cls, config: Config, now: float) -> GroupDeadline | None:
        """Return the deadline of a group that starts `now`; None if it has none.

        Its grace ends before a trainer that has waited for the group from its start gives up.
        """
        seconds, policy = group_deadline_s(config), config.rollout.on_group_deadline
        if seconds is None or policy == "finish":
            return None
        return cls(now + seconds, seconds, policy, min(GRACE_S, (config.timeouts.generate_s - seconds) / 2))

    def sent(self, now: float) -> GroupDeadline:
        """Return it for a process with another clock: `at` is the seconds that are left `now`."""
        return GroupDeadline(max(0.0, self.at - now), self.seconds, self.policy, self.grace_s)

    def received(self, now: float) -> GroupDeadline:
        """Return one that was `sent` on the clock that says `now`."""
        return GroupDeadline(now + self.at, self.seconds, self.policy, self.grace_s)

    def settle(self, responses: ResponseCollector) -> None:
        """Cut the unfinished responses. Raises RolloutError naming them if the policy is to fail."""
        if self.policy == "cut":
            responses.cut()
            return
        raise responses.unfinished_at(f"at the group's deadline of {self.seconds:g} s (rollout.group_deadline_s)")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Travels with a request from its loop to the replica. Requests with the same prefix have the same context.

    `prefix`: requests with the same one share the beginning of their prompts and go to one replica; None: nothing
    shared. `home`: a number that alone determines the replica. `near`: a replica that has the prefix in its cache (see
    `Router.assign`). `deadline`: when the responses must end. `tokens`: what responses already have, by request id; it
    is kept up to date.
    """

    prefix: Hashable = None
    home: int | None = None
    near: int | None = None
    deadline: GroupDeadline | None = None
    tokens: MutableMapping[str, ResponsePart] | None = None


Generate = Callable[[GenerateRequest, RequestContext], Coroutine[Any, Any, GenerateResult]]
"""Sends a request to the engines (`RequestCoalescer.generate`)."""
