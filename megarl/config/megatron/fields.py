"""Checks names and types of passed fields against Megatron-Core's dataclasses, which are imported only for that.

`megatron.transformer`, `.optimizer` and `.ddp` pass fields by name. Unknown names, wrong types and fields that megarl
sets are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import typing
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from megarl.config.megatron.reserved import RESERVED, Target


@functools.cache
def megatron_class(target: Target) -> type[Any]:
    """Return the dataclass of the target's fields. Raises ValueError if megatron-core is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing GPU packages
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer import TransformerConfig
    except ModuleNotFoundError:
        raise ValueError("megatron-core is not installed; run make setup") from None
    classes: dict[Target, type[Any]] = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    return classes[target]


@functools.cache
def fields(target: Target) -> Mapping[str, Any]:
    """Return name -> type of every field that the constructor of the target's dataclass accepts."""
    made = megatron_class(target)
    hints = typing.get_type_hints(made)
    return {field.name: hints[field.name] for field in dataclasses.fields(made) if field.init}


def problem(target: Target, name: str, value: object) -> str | None:
    """Return the problem of `megatron.TARGET.NAME = value` with its fix, or None."""
    key = f"megatron.{target}.{name}"
    if name in RESERVED[target]:
        return f"{key}: reserved; {RESERVED[target][name]}"
    known = fields(target)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        class_name = megatron_class(target).__name__
        return f"{key}: {class_name} of the installed megatron-core has no such field{hint}"
    kind = inspect.formatannotation(known[name])
    try:
        TypeAdapter(known[name]).validate_json(json.dumps(value), strict=True)  # from JSON, a list is a tuple too
    except PydanticSchemaGenerationError:
        return f"{key}: cannot be given in YAML (its type is {kind}); remove it"
    except ValidationError:
        return f"{key}: must be {kind}, not {value!r}"
    return None
