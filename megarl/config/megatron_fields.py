"""Checks names and types of passed fields against Megatron-Core's source, without importing it (or torch).

`megatron.transformer`, `.optimizer` and `.ddp` pass fields by name. Unknown names, wrong types and fields that megarl
sets itself are refused.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from megarl.config.megatron_reserved import RESERVED, Target

# For each target: the classes whose annotated fields it accepts, each with its file under megatron/core.
_SOURCES: dict[Target, list[tuple[str, str]]] = {
    "transformer": [
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ],
    "optimizer": [("optimizer/optimizer_config.py", "OptimizerConfig")],
    "ddp": [("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")],
}
CLASS_NAMES: dict[Target, str] = {
    "transformer": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}


@functools.cache
def fields(target: Target) -> Mapping[str, ast.expr]:
    """Return name -> annotation of every field that the constructor of the target's dataclass accepts."""
    root = core_path()
    found: dict[str, ast.expr] = {}
    for file, class_name in _SOURCES[target]:
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = line.annotation
    return found


@functools.cache
def core_path() -> Path:
    """Return the directory of the installed megatron.core; raises ValueError if it is not installed."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError("megatron-core is not installed; run make setup")
    return Path(spec.origin).parent


def problem(target: Target, name: str, value: object) -> str | None:
    """Return the problem of `megatron.TARGET.NAME = value` with its fix, or None if there is none."""
    key = f"megatron.{target}.{name}"
    known = fields(target)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"{key}: {CLASS_NAMES[target]} of the installed megatron-core has no such field{hint}"
    if name in RESERVED[target]:
        return f"{key}: reserved; {RESERVED[target][name]}"
    try:
        fits = _fits(value, known[name])
    except _NotPlainError:
        return f"{key}: cannot be given in YAML (its type is {ast.unparse(known[name])}); remove it"
    return None if fits else f"{key}: must be {ast.unparse(known[name])}, not {value!r}"


class _NotPlainError(Exception):
    """The annotation is of a type that YAML cannot express (a callable, a torch.dtype, ...)."""


_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def _fits(value: object, annotation: ast.expr) -> bool:
    """Tell whether a YAML value fits a type annotation of Megatron's dataclasses.

    Raises _NotPlainError if YAML cannot express that type.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Constant):
        return value is None
    if isinstance(annotation, ast.BinOp):
        return _any_fits(value, [annotation.left, annotation.right])
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        items = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
        return _fits_generic(value, _last_name(annotation.value), items)
    name = _last_name(annotation)
    if name in ("list", "List", "tuple", "Tuple"):
        return isinstance(value, list)
    if name not in _PLAIN:
        raise _NotPlainError
    return isinstance(value, _PLAIN[name]) and (name == "bool" or not isinstance(value, bool))


def _fits_generic(value: object, name: str, items: list[ast.expr]) -> bool:
    """Do the same as `_fits` for an annotation `name[items]`."""
    if name == "Optional":
        return value is None or _fits(value, items[0])
    if name == "Union":
        return _any_fits(value, items)
    if name == "Literal":
        return value in [ast.literal_eval(item) for item in items]
    if name in ("list", "List"):
        return isinstance(value, list) and all(_fits(item, items[0]) for item in value)
    if name in ("tuple", "Tuple"):
        return isinstance(value, list) and len(value) == len(items) and all(map(_fits, value, items))
    raise _NotPlainError


def _last_name(annotation: ast.expr) -> str:
    return ast.unparse(annotation).split(".")[-1]


def _any_fits(value: object, options: list[ast.expr]) -> bool:
    """Tell whether the value fits one of the annotations; raises _NotPlainError if YAML can express none of them."""
    plain = 0
    for option in options:
        try:
            if _fits(value, option):
                return True
            plain += 1
        except _NotPlainError:
            continue
    if not plain:
        raise _NotPlainError
    return False
