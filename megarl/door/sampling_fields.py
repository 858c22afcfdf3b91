"""Reads sampling parameters of HTTP requests. Pure.

A field that would change the response and is not supported is refused by name, and so is an unknown one: a harness must
not train on samples of another distribution than the one that it asked for. Fields without an effect are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.door.api_errors import ApiError, refused, too_long
from megarl.rollout.requests import SamplingSpec

MOST_CHOICES = 128
MOST_STOPS = 16
LARGEST_SEED = 2**63 - 1

Fields = Mapping[str, Any]

# Fields that change the response unless they have one of these values. A null is without effect in every field.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": ({}, []),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_decoding": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "logprob_token_ids": (),
    "prompt_logprob_token_ids": (),
    "truncate_prompt_tokens": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
# The door's responses are token ids, or text without special tokens, and whole; these choose among other forms of them.
HARMLESS = frozenset(
    ("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "skip_clone",
     "skip_reading_prefix_cache", "flat_logprobs", "routed_experts_prompt_start", "include_stop_str_in_output")
)  # fmt: skip
READ = frozenset(
    ("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos",
     "repetition_penalty", "logprobs")
)  # fmt: skip


@dataclass(frozen=True)
class ModelLimits:
    """Holds what the model allows: tokens of prompt and response together, ids, and the ids that end a response."""

    max_model_len: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingChoice:
    """Holds what a request asks for: `n` responses; `seed` of the first one, the others follow from it."""

    spec: SamplingSpec
    n: int
    seed: int | None


def check_fields(fields: Fields, known: frozenset[str], where: str = "") -> None:
    """Raise ApiError for a field that is neither known nor without effect. `where`: what its name begins with."""
    for name, value in fields.items():
        if value is None or name in known or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            raise refused(f"{where}{name}", "the door does not know this field, so it could not obey it; remove it")
        if not any(value == each for each in NEUTRAL[name]):
            raise refused(f"{where}{name}", "is not supported by the door, and would change the response; remove it")


def sampling_of(fields: Fields, limits: ModelLimits, prompt_tokens: int, where: str = "") -> SamplingChoice:
    """Read vLLM's sampling parameters of a request whose names were checked.

    Default: plain sampling at temperature 1 until the model's end, so that log-probs are those of the model itself.
    `max_tokens` is cut to what fits. Raises ApiError naming the field that is wrong.
    """
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, limits.max_model_len)
    stops = tuple(token_list(fields, "stop_token_ids", limits, where))
    ignores = flag(fields, "ignore_eos", False, where)
    top_k = whole(fields, "top_k", -1, -1, limits.vocabulary, where)
    spec = SamplingSpec(
        max_tokens=min(room, whole(fields, "max_tokens", room, 1, LARGEST_SEED, where)),
        temperature=number(fields, "temperature", 1.0, 0.0, 100.0, where),
        stop_token_ids=stops if ignores else tuple(sorted({*stops, *limits.stop_token_ids})),
        top_p=number(fields, "top_p", 1.0, 1e-9, 1.0, where),
        top_k=-1 if top_k == 0 else top_k,
        repetition_penalty=number(fields, "repetition_penalty", 1.0, 1e-3, 100.0, where),
        min_p=number(fields, "min_p", 0.0, 0.0, 1.0, where),
        ignore_eos=ignores,
    )
    seed = None if fields.get("seed") is None else whole(fields, "seed", 0, -LARGEST_SEED, LARGEST_SEED, where)
    return SamplingChoice(spec, whole(fields, "n", 1, 1, MOST_CHOICES, where), seed)


def number(fields: Fields, name: str, default: float, low: float, high: float, where: str = "") -> float:
    """Return a number of a request that must be in [low, high]. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refused(f"{where}{name}", f"must be a number, not {_shown(value)}")
    if not low <= value <= high:
        raise refused(f"{where}{name}", f"must be between {low:g} and {high:g}, not {value:g}")
    return float(value)


def whole(fields: Fields, name: str, default: int, low: int, high: int, where: str = "") -> int:
    """Return a whole number of a request that must be in [low, high]. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(f"{where}{name}", f"must be a whole number, not {_shown(value)}")
    if not low <= value <= high:
        raise refused(f"{where}{name}", f"must be between {low} and {high}, not {value}")
    return value


def flag(fields: Fields, name: str, default: bool, where: str = "") -> bool:
    """Return a boolean of a request. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(f"{where}{name}", f"must be true or false, not {_shown(value)}")
    return value


def text(fields: Fields, name: str, default: str, where: str = "") -> str:
    """Return a text of a request. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise refused(f"{where}{name}", f"must be a text, not {_shown(value)}")
    return value


def token_list(fields: Fields, name: str, limits: ModelLimits, where: str = "") -> list[int]:
    """Return token ids of a request. Raises ApiError if one is not in the vocabulary, which would end the engine."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise refused(f"{where}{name}", "must be a list of whole numbers")
    if value and not (min(value) >= 0 and max(value) < limits.vocabulary):
        outside = next(each for each in value if not 0 <= each < limits.vocabulary)
        raise refused(f"{where}{name}", f"{outside} is no token id of the model, which has {limits.vocabulary}")
    return value


def stop_strings(fields: Fields) -> tuple[str, ...]:
    """Return the stop strings of a request: one text or a list of them. Raises ApiError."""
    value = fields.get("stop")
    given = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise refused("stop", "must be a text or a list of texts")
    if len(given) > MOST_STOPS:
        raise refused("stop", f"at most {MOST_STOPS} texts, not {len(given)}")
    if not all(given):
        raise refused("stop", "a text is empty, so every response would end at once; remove it")
    return tuple(given)


def parse_object(content: object) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises ApiError for anything else."""
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    return content


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
