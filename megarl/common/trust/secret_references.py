"""Replaces references to environment variables by their values, where the values are used.

A config names a secret as `{env: NAME}`, a mapping with this one key. Every copy of the config (config.yaml,
checkpoints, Weights & Biases, logs) holds only the reference. The process that uses the value takes it from its own
environment.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIKE_A_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret(_?key)?|passw(or)?d|credentials?"
    r"|(api|auth|access|hf|bearer|session|refresh|security|github)_token)$",
    re.IGNORECASE,
)


def references(values: Mapping[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, name of the variable) of each reference inside `values`, which itself is none."""
    for name, value in values.items():
        yield from _references(value, f"{key}.{name}")


def literal_secrets(values: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the dotted key of each string inside `values` whose name, or that of its list, says it is a secret.

    A hyphen in a name counts as an underscore: headers have names such as `x-api-key`.
    """
    for name, value in values.items():
        yield from _literal_secrets(value, f"{key}.{name}", bool(_LIKE_A_SECRET.search(str(name).replace("-", "_"))))


def resolved(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `values` with each reference inside replaced by the variable's value.

    Raises ValueError naming the key and the variable if the variable is not set in this process.
    """
    for place, name in references(values, key):
        if name not in os.environ:
            raise ValueError(missing(place, name))
    return {name: _replaced(value) for name, value in values.items()}


def missing(place: str, name: str) -> str:
    """Return the message for a reference to a variable that is not set."""
    return f"{place}: the environment variable {name} is not set; export it before the start"


def _variable(value: object) -> str | None:
    """Return the variable's name if `value` is a reference."""
    if isinstance(value, Mapping) and set(value) == {"env"}:
        name = value["env"]
        if isinstance(name, str) and _NAME.fullmatch(name):
            return name
    return None


def _references(value: object, key: str) -> Iterator[tuple[str, str]]:
    name = _variable(value)
    if name is not None:
        yield key, name
    elif isinstance(value, Mapping):
        for inner, content in value.items():
            yield from _references(content, f"{key}.{inner}")
    elif isinstance(value, list | tuple):
        for index, content in enumerate(value):
            yield from _references(content, f"{key}.{index}")


def _literal_secrets(value: object, key: str, named_secret: bool) -> Iterator[str]:
    """Yield the keys inside one value; `named_secret`: its name says that it is a secret."""
    if isinstance(value, str):
        if value and named_secret:
            yield key
    elif isinstance(value, Mapping):
        if _variable(value) is None:
            yield from literal_secrets(value, key)
    elif isinstance(value, list | tuple):
        for index, content in enumerate(value):
            yield from _literal_secrets(content, f"{key}.{index}", named_secret)


def _replaced(value: Any) -> Any:  # noqa: ANN401  # whatever the config holds
    name = _variable(value)
    if name is not None:
        return os.environ[name]
    if isinstance(value, Mapping):
        return {inner: _replaced(content) for inner, content in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(content) for content in value]
    return value
