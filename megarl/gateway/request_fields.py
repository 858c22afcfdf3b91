"""Reads the fields of HTTP requests, including sampling parameters. Pure.

An unknown field is refused by name: it may change the response, and a harness must not train on samples of another
distribution than it asked for. Nulls and fields without effect are accepted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import SamplingSpec, request_seed
from megarl.rollout.fleet.external_requests import Failure

TOO_LONG, NO_TURN_LEFT = "context_length_exceeded", "no_turn_left"
BOUNDS = (TOO_LONG, NO_TURN_LEFT)  # codes of errors that end a trajectory
RUN_SESSIONS = "megarl-"  # prefix of session names for the run's samples; only PUT opens these


class ApiError(Exception):
    """A request cannot be answered; the answer has OpenAI's form. `field`: the wrong field; `code`: for programs."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", field: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.field, self.code = status, message, kind, field, code

    def content(self) -> dict[str, object]:
        """Return the JSON content of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}


def refused(field: str, why: str) -> ApiError:
    """Return the error of a field with a wrong or unsupported value."""
    return ApiError(400, f"{field}: {why}", field=field)


def too_many(message: str) -> ApiError:
    """Return the error of a request for which there is no room."""
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")


def no_session() -> ApiError:
    """Return the error of an unknown session."""
    reason = (
        "there is no such session: it never began, was ended, was unused for too long (twice timeouts.generate_s), or "
        f"its gateway has died; only PUT opens one whose name begins with {RUN_SESSIONS!r}"
    )
    return ApiError(404, reason, code="session_not_found")


def not_generated(failure: Failure, message: str) -> ApiError:
    """Return the error of a response that the pool did not complete."""
    if failure == "refused":
        return ApiError(400, message)
    if failure == "late":
        return ApiError(504, message, kind="timeout_error", code="timeout")
    return ApiError(503, f"the rollout pool could not answer: {message}", kind="server_error", code="unavailable")


LARGEST_SEED = 2**63 - 1

# These choose the form of responses. The gateway's are whole, as token ids or as text without special tokens.
HARMLESS = frozenset(
    ("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "skip_clone",
     "skip_reading_prefix_cache", "flat_logprobs", "routed_experts_prompt_start", "include_stop_str_in_output")
)  # fmt: skip

FieldsOf = TypeVar("FieldsOf")
_FIELD = re.compile("Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


@dataclass(frozen=True)
class ModelLimits:
    """The model's limits: tokens of prompt and response together, vocabulary size, and ids that end a response."""

    max_model_len: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingChoice:
    """The sampling of a request: `n` responses; `seed`: of the first one, from which the others' are derived."""

    spec: SamplingSpec
    n: int
    seed: int | None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters of vLLM that the gateway supports.

    The default is plain sampling at temperature 1 until the model's end, so that log-probs are the model's. Only the
    default of the last three is supported; clients send them anyway.
    """

    n: Annotated[int, Meta(ge=1, le=128)] = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-LARGEST_SEED, le=LARGEST_SEED)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    min_tokens: Annotated[float, Meta(ge=0, le=0)] = 0.0

    def choice(self, limits: ModelLimits, prompt_tokens: int, where: str = "") -> SamplingChoice:
        """Return the sampling for the engine, with `max_tokens` cut to what fits. Raises ApiError."""
        room = limits.max_model_len - prompt_tokens
        if room < 1:
            reason = f"the prompt has {prompt_tokens} tokens; with one of a response it may have {limits.max_model_len} (max_model_len)"  # noqa: E501
            raise ApiError(400, reason, field="messages", code=TOO_LONG)
        stops = check_tokens(f"{where}.stop_token_ids".lstrip("."), self.stop_token_ids, limits)
        if self.top_k > limits.vocabulary:
            raise refused(f"{where}.top_k".lstrip("."), f"the model has {limits.vocabulary} tokens")
        spec = SamplingSpec(
            max_tokens=min(room, self.max_tokens or room),
            temperature=self.temperature,
            stop_token_ids=tuple(stops) if self.ignore_eos else tuple(sorted({*stops, *limits.stop_token_ids})),
            top_p=self.top_p,
            top_k=self.top_k or -1,
            repetition_penalty=self.repetition_penalty,
            min_p=self.min_p,
            ignore_eos=self.ignore_eos,
        )
        return SamplingChoice(spec, self.n, self.seed)


def read_fields(
    body: Mapping[str, Any], kind: type[FieldsOf], *, ignored: frozenset[str] = HARMLESS, where: str = ""
) -> FieldsOf:
    """Return the fields of a request as a `kind`, without nulls and `ignored` fields.

    `where`: the field of the request that holds them. Raises ApiError naming the first wrong one.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in ignored}
    return checked(given, kind, where)


def checked(content: object, kind: type[FieldsOf], where: str = "") -> FieldsOf:
    """Return JSON content as a `kind`. Raises ApiError naming the wrong field."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at `$")
        field = where + path.removesuffix("`")
        if found := _FIELD.fullmatch(why):
            field = f"{field}.{found[2]}"
            unknown = "the gateway does not know this field, so it could not obey it; remove it"
            why = unknown if found[1] == "contains unknown" else "is missing"
        raise refused(field.lstrip("."), why[:1].lower() + why[1:]) from None


def check_tokens(field: str, ids: list[int], limits: ModelLimits) -> list[int]:
    """Return token ids. Raises ApiError if one is not in the vocabulary, which would kill the engine."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocabulary):
        outside = next(each for each in ids if not 0 <= each < limits.vocabulary)
        raise refused(field, f"{outside} is not a token id of the model, which has {limits.vocabulary}")
    return ids


class SessionTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms of a session that the run opens for a sample: the body of `PUT /v1/sessions/ID`.

    The run decides what it trains on: every request of the session is sampled like the run's other responses, whatever
    its sampling fields say. It may only ask for fewer tokens and for more stop tokens.

    `seed`: None if responses need none. `prefix`: equal for the sessions of a training group, whose first prompts are
    equal; None outside training. `deadline`: the group's; in the body as `GroupDeadline.sent`. `most_turns`: how many
    requests the session may make; None: any number. `replaces`: ends the sessions with this prefix, which a dead
    attempt left; "": none.
    """

    sampling: SamplingSpec
    seed: int | None = None
    prefix: str | None = None
    deadline: GroupDeadline | None = None
    replaces: str = ""
    most_turns: int | None = None

    def choice(self, asked: SamplingChoice, number: int) -> SamplingChoice:
        """Return the sampling of request `number`, which asked for `asked`. Raises ApiError beyond `most_turns`."""
        if self.most_turns is not None and number >= self.most_turns:
            reason = f"the session has made the {self.most_turns} requests that it may make (most_turns)"
            raise ApiError(400, reason, code=NO_TURN_LEFT)
        most = min(asked.spec.max_tokens, self.sampling.max_tokens)
        stops = tuple(sorted({*asked.spec.stop_token_ids, *self.sampling.stop_token_ids}))
        seed = None if self.seed is None else request_seed(self.seed, 0, 0, number)
        return SamplingChoice(replace(self.sampling, max_tokens=most, stop_token_ids=stops), asked.n, seed)


def read_terms(body: Mapping[str, Any], now: float) -> SessionTerms:
    """Return the body of `PUT /v1/sessions/ID`, received `now`. Raises ApiError naming the wrong field."""
    terms = checked(body, SessionTerms)
    deadline = None if terms.deadline is None else terms.deadline.received(now)
    return msgspec.structs.replace(terms, deadline=deadline)
