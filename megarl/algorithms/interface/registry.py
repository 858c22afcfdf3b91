"""Functions that a config names: registered ones, and a user's by import path.

A function takes its inputs and, if it has any, its options: an instance of the `Section` subclass that annotates the
second parameter. This module does not import torch.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megarl.common.imports import imported
from megarl.common.options import Section

I = TypeVar("I")  # noqa: E741  # inputs
R = TypeVar("R")  # result
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Chosen(Generic[I, R]):
    """A function and its options, as chosen in a config under `name`."""

    name: str
    function: Callable[..., R]
    options: Section | None = None

    def __call__(self, inputs: I) -> R:
        """Call the function."""
        return self.function(inputs) if self.options is None else self.function(inputs, self.options)


@dataclass(frozen=True)
class RegisteredFunction(Generic[I, R]):
    """A function that can be chosen. `options`: the class of its options, or None; `paper`: its source."""

    name: str
    function: Callable[..., R]
    options: type[Section] | None
    title: str = ""
    paper: str = ""

    @property
    def own(self) -> bool:
        """True for a user's function, False for a registered one."""
        return ":" in self.name

    def choose(self, given: Mapping[str, Any]) -> Chosen[I, R]:
        """Return the function with options. Raises pydantic.ValidationError, or ValueError if it has no options."""
        if self.options is None:
            if given:
                raise ValueError(f"{self.name} has no options")
            return Chosen(self.name, self.function)
        # Strict validation refuses "5" for 5 and true for 1; from JSON it accepts lists as tuples.
        options = self.options.model_validate_json(json.dumps(dict(given)), strict=True)
        return Chosen(self.name, self.function, options)


class FunctionRegistry(Generic[I, R]):
    """The functions of one kind by name. `kind`: for messages ("loss")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, RegisteredFunction[I, R]] = {}

    def register(self, name: str, *, title: str, paper: str) -> Callable[[F], F]:
        """Return a decorator that registers a function. `paper`: where it was published.

        Raises ValueError if the name is taken or the function's signature is wrong.
        """

        def decorate(function: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = RegisteredFunction(name, function, options_of(function), title, paper)
            return function

        return decorate

    def __iter__(self) -> Iterator[RegisteredFunction[I, R]]:
        return (self._entries[name] for name in self.names)

    @property
    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._entries)

    def find(self, name: str) -> RegisteredFunction[I, R]:
        """Return a registered function, or the user's at an import path `package.module:function`.

        Raises ValueError that says what is wrong with name, path or function.
        """
        if (entry := self._entries.get(name)) is not None:
            return entry
        module, colon, attribute = name.partition(":")
        if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError(f"{name!r} is neither {', '.join(self.names)} nor an import path package.module:function")
        if (here := os.getcwd()) not in sys.path:  # as the pool does for reward functions and agents
            sys.path.append(here)
        function = imported(name, f"the {self.kind}")
        if not inspect.isfunction(function):
            raise ValueError(f"{name} is a {type(function).__name__}; it has to be a function")
        return RegisteredFunction(name, function, options_of(function))


def options_of(function: Callable[..., Any]) -> type[Section] | None:
    """Return the class of a function's options, None if it has only one parameter.

    Raises ValueError unless its signature is (inputs) or (inputs, options: OptionsClass).
    """
    parameters = list(inspect.signature(function).parameters.values())
    name = getattr(function, "__qualname__", repr(function))
    wanted = f"{name} has to take (inputs) or (inputs, options: X) with a class X(Section)"
    plain = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    if not plain or len(parameters) not in (1, 2):
        raise ValueError(f"{wanted}, not {inspect.signature(function)}")
    if len(parameters) == 1:
        return None
    annotation = parameters[1].annotation
    if isinstance(annotation, str):  # postponed; only this one is needed at run time
        annotation = getattr(sys.modules[function.__module__], annotation.strip("'\""), annotation)
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        raise ValueError(f"{wanted}; its second parameter has the annotation {annotation!r}")
    return annotation
