"""Resolves the name or import path of a reward function to a function `RewardInput -> RewardResult`.

A user's function may take the whole sample, parameters named after its fields, or `(response, answer)`; it may return a
number or a RewardResult. Anything else raises ValueError with the expected form.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

from megarl.common.imports import imported
from megarl.rewards.types import RewardFunction, RewardInput, RewardResult

SHIPPED = {
    "code": "megarl.rewards.builtin.code:CodeReward",
    "gsm8k": "megarl.rewards.builtin.gsm8k:gsm8k",
    "math": "megarl.rewards.builtin.math:math",
}
# Parameters that identify reward functions of other trainers, and their names here.
_OTHERS = {
    "completions": "TRL, which gives it lists; here it is called once for each sample: (response, answer)",
    "solution_str": "verl: solution_str is `response` here, ground_truth is `answer`, extra_info is `row`",
}
FIELDS = tuple(f.name for f in fields(RewardInput))
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def resolve(function: str, kwargs: dict[str, Any] | None = None) -> RewardFunction:
    """Return the reward function `gsm8k`, `math`, `code` or `package.module:function`, with `kwargs` bound by name.

    A class is instantiated with `kwargs`, and its instance is the function. The function's attribute `warm_up`, if it
    has one, is called here, so slow imports do not count as time of a sample. Raises ValueError for a path that cannot
    be imported or a signature that cannot be adapted.
    """
    path, _, name = function.partition(":")
    if path.endswith(".py"):
        module = ".".join(Path(path).with_suffix("").parts).lstrip("./")
        raise ValueError(
            f"reward.function {function!r} is a file: write the path that imports it, {module}:{name or 'FUNCTION'}, "
            "and start in a directory where Python finds it"
        )
    if function not in SHIPPED and not name:
        names = ", ".join(sorted(SHIPPED))
        raise ValueError(f"reward.function {function!r} is neither {names} nor a path `package.module:function`")
    target = imported(SHIPPED.get(function, function), "reward.function")
    kwargs = dict(kwargs or {})
    if inspect.isclass(target):
        try:
            target, kwargs = target(**kwargs), {}
        except TypeError as error:
            raise ValueError(
                f"reward function {function!r} cannot be made with reward.kwargs {sorted(kwargs)}: {error}"
            ) from error
    if not callable(target):
        raise ValueError(f"reward function {function!r} is a {type(target).__name__}, not a function")
    called = target if inspect.isroutine(target) else type(target).__call__
    if inspect.iscoroutinefunction(called):
        raise ValueError(f"reward function {function!r} is async: write it with `def`, because it has its own process")
    adapted = _adapt(function, target, kwargs)
    warm_up = getattr(target, "warm_up", None)
    if callable(warm_up):
        warm_up()
    return lambda sample: _with_checked_turns(as_result(adapted(sample)), sample)


def row_check(function: str) -> Callable[[str, dict[str, Any]], object] | None:
    """Return the `check_row(answer, row)` of a shipped reward, which raises ValueError for a useless row, or None.

    A user's module is never imported outside its process.
    """
    if function not in SHIPPED:
        return None
    return getattr(importlib.import_module(SHIPPED[function].partition(":")[0]), "check_row", None)


def _with_checked_turns(result: RewardResult, sample: RewardInput) -> RewardResult:
    if result.turn_rewards and len(result.turn_rewards) != sample.model_turns:
        raise ValueError(
            f"the reward has {len(result.turn_rewards)} turn_rewards, and the model had {sample.model_turns} turns: "
            "return one number for each, in order, or none"
        )
    return result


def as_result(value: Any) -> RewardResult:  # noqa: ANN401  # returned by a user's function
    """Convert the return value of a reward function to a RewardResult.

    Raises ValueError unless it is a finite number or a RewardResult with finite numbers, or if a component has a name
    that no metric can have.
    """
    try:
        if isinstance(value, str):
            raise TypeError("a text")  # even one that float() would accept
        raw = value if isinstance(value, RewardResult) else RewardResult(float(value))
        components = {str(name): float(value) for name, value in raw.components.items()}
        answer = None if raw.answer is None else str(raw.answer)
        result = RewardResult(float(raw.score), components, answer, tuple(float(each) for each in raw.turn_rewards))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"a reward must be a number or a RewardResult, not {value!r:.80}") from error
    if wrong := [name for name in components if not name or "/" in name]:
        raise ValueError(
            f"the reward component {wrong[0]!r} cannot be part of the metric reward/component/NAME: give it a name "
            f"without a slash, for example {wrong[0].strip('/').replace('/', '_') or 'format'!r}"
        )
    if not math.isfinite(result.score):
        raise ValueError(f"the reward is {result.score}, not a finite number")
    if bad := [each for each in result.turn_rewards if not math.isfinite(each)]:
        raise ValueError(f"a reward of a turn is {bad[0]}, not a finite number")
    return result


def _adapt(name: str, target: Callable[..., object], kwargs: dict[str, Any]) -> Callable[[RewardInput], object]:
    """Return a function of one sample that calls `target` with the arguments that its signature requires."""
    parameters = _open_parameters(name, target, kwargs)
    for parameter in parameters:
        if parameter.name in _OTHERS:
            raise ValueError(f"reward function {name!r} has the signature of {_OTHERS[parameter.name]}")
    takes_rest = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in _VARIADIC]
    required = [p for p in named if p.default is Parameter.empty]
    bound = partial(target, **kwargs)
    if len(required) == 1 and required[0].kind is not Parameter.KEYWORD_ONLY and _is_sample(required[0]):
        return bound
    by_keyword = all(p.kind is not Parameter.POSITIONAL_ONLY and p.name in FIELDS for p in required)
    if by_keyword and (required or takes_rest):
        wanted = FIELDS if takes_rest else tuple(p.name for p in named if p.name in FIELDS)
        wanted = tuple(field for field in wanted if field not in kwargs)
        return lambda sample: bound(**{field: getattr(sample, field) for field in wanted})
    if len(required) == 2 and all(p.kind is not Parameter.KEYWORD_ONLY for p in required):
        return lambda sample: bound(sample.response, sample.answer)
    raise ValueError(
        f"reward function {name!r} needs ({', '.join(p.name for p in required)}): it must take one "
        f"RewardInput, or (response, answer), or parameters named among {', '.join(FIELDS)}; give the others in "
        "`reward.kwargs`"
    )


def _open_parameters(name: str, target: Callable[..., object], kwargs: dict[str, Any]) -> list[Parameter]:
    """Return the parameters that `kwargs` does not bind. Raises ValueError if a kwarg is not a parameter."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {name!r} has no signature: wrap it in a plain function") from error
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = sorted(set(kwargs) - by_name)
    if unknown and not takes_any:
        raise ValueError(f"reward.kwargs {unknown} are not parameters of {name!r}: {sorted(by_name)}")
    return [p for p in parameters if p.name not in kwargs]


def _is_sample(parameter: Parameter) -> bool:
    """Return whether the only required parameter is the whole sample, not one of its fields."""
    annotation = parameter.annotation
    if annotation is RewardInput:
        return True
    if isinstance(annotation, str) and annotation.strip("'\"").split(".")[-1] == "RewardInput":
        return True
    return parameter.name not in FIELDS
