"""Names and types of Megatron-Core's config fields, read from its source without importing it (or torch).

`megatron.transformer`, `.optimizer` and `.ddp` pass fields by name; a typo or a wrong type is told here, and
so is a field that megarl sets itself, or that would re-open one of Megatron's known traps.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.megatron_reserved import RESERVED, Target

# Per target: file under megatron/core and the classes whose annotated fields it takes.
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
    """Field name to annotation, of every field that the dataclass's constructor takes."""
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
    """The directory of the installed megatron.core; ValueError if there is none."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError("megatron-core is not installed; run make setup")
    return Path(spec.origin).parent


def problem(target: Target, name: str, value: Any) -> str | None:
    """What is wrong with `megatron.TARGET.NAME = value`, with the fix; None if nothing is."""
    key = f"megatron.{target}.{name}"
    known = fields(target)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"{key}: {CLASS_NAMES[target]} of the installed megatron-core has no such field{hint}"
    if name in RESERVED[target]:
        return f"{key}: not for the user: {RESERVED[target][name]}"
    try:
        fits = _fits(value, known[name])
    except _NotPlainError:
        return f"{key}: cannot be given in YAML (its type is {ast.unparse(known[name])}); remove it"
    return None if fits else f"{key}: must be {ast.unparse(known[name])}, not {value!r}"


class _NotPlainError(Exception):
    """The annotation names something that YAML cannot hold (a callable, a torch.dtype, ...)."""


_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def _fits(value: Any, annotation: ast.expr) -> bool:
    """Whether a YAML value fits a type annotation of Megatron's dataclasses."""
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


def _fits_generic(value: Any, name: str, items: list[ast.expr]) -> bool:
    """The same for `name[items]`."""
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


def _any_fits(value: Any, options: list[ast.expr]) -> bool:
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
