"""Modules of registered functions with one line written wrongly, and their functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

from megarl.algorithms.interface.registry import FunctionRegistry


def mutant(module: ModuleType, name: str, old: str, new: str) -> Callable[..., Any]:
    """The function `name` of the module whose source has `new` where it has `old`, once: in the function if it is
    there."""
    source, part = inspect.getsource(module), inspect.getsource(getattr(module, name))
    part = part if old in part else source
    assert part.count(old) == 1, f"{module.__name__} has {old!r} {part.count(old)} times"
    scope: dict[str, Any] = {"__name__": module.__name__}
    with mock.patch.object(FunctionRegistry, "register", lambda *args, **kwargs: lambda function: function):
        exec(compile(source.replace(part, part.replace(old, new)), f"{module.__name__} (mutant)", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function
