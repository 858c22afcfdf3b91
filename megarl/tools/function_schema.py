"""Describes a user's function as a tool: its arguments as a JSON schema, from its signature and docstring."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from megarl.common.imports import imported


@dataclass(frozen=True)
class DescribedFunction:
    """A function, its name and description for the model, and its arguments as a pydantic model.

    `bound`: further arguments, which the model does not give.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    function: Callable[..., object]
    bound: Mapping[str, Any]
    idempotent: ClassVar = False  # as far as the function says

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        schema = self.arguments.model_json_schema()
        return {key: value for key, value in schema.items() if key != "title"} | {"type": "object"}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to their types; raises ValueError that tells the model what is wrong."""
        try:
            model = self.arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the arguments"
            raise ValueError(f"{self.name}: {place}: {first['msg']}") from error
        return {name: getattr(model, name) for name in type(model).model_fields}


def import_function(path: str) -> Callable[..., object]:
    """Return what the import path `package.module:function` names; raises ValueError that names the mistake."""
    target: object = imported(path, "the tool function")
    if not callable(target):
        raise ValueError(f"the tool function {path!r} is a {type(target).__name__}, not a function")
    return target


def describe(path: str, function: Callable[..., object], bound: Mapping[str, Any]) -> DescribedFunction:
    """Return a function's description, without the arguments that `bound` gives it.

    Raises ValueError if an argument has no type that JSON can hold, or if there is no docstring.
    """
    name = path.rpartition(":")[2].rpartition(".")[2]
    summary = inspect.getdoc(function)
    if not summary:
        raise ValueError(
            f"the tool function {path!r} has no docstring: write one, it tells the model what the tool does"
        )
    signature = inspect.signature(function)
    if unknown := sorted(set(bound) - set(signature.parameters)):
        raise ValueError(f"the tool function {path!r} has no arguments {unknown}, which its kwargs give")
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ValueError(f"the tool function {path!r}: a type of its arguments cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.name in bound:
            continue
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ValueError(f"the tool function {path!r} has the argument {parameter}: a tool's arguments have names")
        if parameter.name not in types:
            raise ValueError(
                f"the tool function {path!r}: the argument {parameter.name!r} has no type; write for example "
                f"`{parameter.name}: str`"
            )
        default = ... if parameter.default is Parameter.empty else parameter.default
        fields[parameter.name] = (types[parameter.name], default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        described = DescribedFunction(name, summary, model, function, bound)
        _ = described.parameters
    except (PydanticUserError, NameError, TypeError) as error:
        message = str(error).splitlines()[0]
        raise ValueError(f"the tool function {path!r} has an argument that JSON cannot hold: {message}") from error
    return described
