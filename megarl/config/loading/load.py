"""Reads YAML and `section.key=value` overrides into a `Config`; each error names the full key and the fix.

Relative paths start at the current directory, wherever the YAML file is. Only `model.shape`, which recipes use for
plans, is also looked for above the file.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megarl.common.errors import ConfigError
from megarl.config.loading.removed_keys import Tree, advice_on, without_removed
from megarl.config.schema import Config, ModelConfig

# The level of each key: `basic` if most runs set it, else `expert`. Basic keys are printed and documented first.

# Dotted keys, without the places in lists.
BASIC = frozenset({
    "run.name", "run.dir", "run.steps",
    "model.path",
    "trainer.gpus", "trainer.gpus_per_node", "trainer.parallel.tensor", "trainer.parallel.context",
    "trainer.parallel.pipeline", "trainer.parallel.expert", "trainer.parallel.sequence", "trainer.micro_batch_tokens",
    "trainer.optimizer.lr", "trainer.optimizer.warmup_steps",
    "algorithm.advantage", "algorithm.loss", "algorithm.kl.coef",
    "batch.groups", "batch.samples_per_group",
    "sampling.max_tokens", "sampling.temperature",
    "data.path", "data.sets", "data.sets.name", "data.sets.path", "data.sets.weight", "data.format",
    "data.max_prompt_tokens",
    "reward.function", "reward.workers",
    "agent.loop",
    "tools", "tools.kind",
    "evaluation.sets", "evaluation.sets.name", "evaluation.sets.path", "evaluation.every",
    "rollout.replicas", "rollout.tensor_parallel", "rollout.gpus_per_node", "rollout.gpu_memory_utilization",
    "admission.mode", "admission.sync_interval", "admission.max_staleness",
    "checkpoint.every", "checkpoint.keep_last",
    "launch.time_limit",
})  # fmt: skip


def level(key: str) -> Literal["basic", "expert"]:
    """Return the level of a dotted key; a section has its most basic key's."""
    return "basic" if key in BASIC or any(each.startswith(f"{key}.") for each in BASIC) else "expert"


def ordered(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the names of a section's keys, basic ones first.

    `prefix`: the section's key and a dot; empty for the whole config.
    """
    return sorted(section.model_fields, key=lambda name: level(prefix + name))


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-6 as a number (YAML 1.1 requires 1.0e-6) and refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError([f"line {line}: the key {key!r} is not a string; put it in quotes"])
            if key in seen:
                raise ConfigError([f"{key}: given twice, in lines {seen[key]} and {line}; remove one"])
            seen[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
               r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)  # fmt: skip


def parse_yaml(text: str) -> object:
    """Parse YAML text to plain values. Raises ConfigError with the line of a syntax error or a repeated key."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        reported = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ConfigError([f"not valid YAML: {reported}"]) from None


def parse_override(text: str) -> tuple[list[str], object]:
    """Parse `section.key=value` to (["section", "key"], value as YAML); an empty value is None.

    Raises ConfigError naming the override for any other form.
    """
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError([f"override {text!r}: write section.key=value, e.g. trainer.optimizer.lr=1e-5"])
    try:
        return path, parse_yaml(value)
    except ConfigError as error:
        raise ConfigError([f"override {text!r}: {problem}" for problem in error.problems]) from None


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `tree` with all overrides; missing sections are added, and later overrides win.

    Raises ConfigError for an override inside a list or inside a value that is not a section.
    """
    tree = json.loads(json.dumps(tree, default=str))
    for text in overrides:
        path, value = parse_override(text)
        try:
            _section_at(tree, path)[path[-1]] = value
        except ConfigError as error:
            raise ConfigError([f"override {text!r}: {problem}" for problem in error.problems]) from None
    return tree


def _section_at(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Return the section of `tree` that holds the last name of `path`; add it, and those above it, if missing."""
    section: Any = tree  # a node of nested plain values
    for depth, name in enumerate(path[:-1]):
        if isinstance(section, list):
            raise _inside_list(path[:depth])
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict | list):
            raise ConfigError([f"{'.'.join(path)}: {'.'.join(path[: depth + 1])} is not a section"])
    if isinstance(section, list):
        raise _inside_list(path[:-1])
    found: dict[str, Any] = section
    return found


def _inside_list(path: list[str]) -> ConfigError:
    whole = ".".join(path)
    return ConfigError([f"{whole}: a list; override it as a whole, e.g. '{whole}=[...]'"])


def load_config(path: Path | str, overrides: Sequence[str] = (), *, stored: bool = False) -> Config:
    """Read a YAML file, apply the overrides and validate each value.

    `stored`: the file is RUN_DIR/config.yaml, perhaps of an earlier version; removed keys are dropped. Raises
    ConfigError listing every problem. `checks.check` checks conditions on several sections.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"no such config file; current directory: {Path.cwd()}"], str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from None
    try:
        tree = parse_yaml(text)
        if tree is None:
            tree = {}
        if not isinstance(tree, dict):
            raise ConfigError([f"must hold sections (run:, model:, ...), not a {type(tree).__name__}"])
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None
    if stored:
        tree = without_removed(tree)
    changed = apply_overrides(tree, overrides)  # its errors name the override, not the file
    try:
        config = config_from_tree(changed)
    except ConfigError as error:
        raise _with_origins(error, path, tree, overrides) from None
    return config.model_copy(update={"model": _with_shape_of_checkout(config.model, path)})


def _with_shape_of_checkout(model: ModelConfig, path: Path) -> ModelConfig:
    """Return `model` with a missing relative `shape` resolved against the nearest directory above `path`."""
    shape = model.shape
    if shape is None or shape.is_absolute() or shape.exists():
        return model
    found = next((above / shape for above in path.resolve().parents if (above / shape).is_dir()), shape)
    return model.model_copy(update={"shape": found})


def _with_origins(error: ConfigError, path: Path, tree: dict[str, Any], overrides: Sequence[str]) -> ConfigError:
    """Return `error` with the override that causes each problem; the file is named if there are others."""
    before = [_problems(tree, overrides[:count]) for count in range(len(overrides))]
    reported, of_file = [], False
    for problem in error.problems:
        without = [count for count, problems in enumerate(before) if problem not in problems]
        of_file = of_file or not without
        reported.append(f"{problem} (on the command line: {overrides[without[-1]]})" if without else problem)
    return ConfigError(reported, str(path) if of_file else "")


def _problems(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    try:
        config_from_tree(apply_overrides(tree, overrides))
    except ConfigError as error:
        return error.problems
    return []


def config_from_tree(tree: dict[str, Any]) -> Config:
    """Validate nested plain values, as read from YAML or JSON. Raises ConfigError listing every problem."""
    try:
        # Strict validation refuses "5" for 5 and true for 1; from JSON it accepts lists as tuples and strings as paths.
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError([explain(detail, tree) for detail in error.errors(include_url=False)]) from None


def to_yaml(config: Config) -> str:
    """Return the config as YAML with defaults; `load_config` reads it back to an equal `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section class inside an annotation such as `list[EvalSetConfig]` or `KLConfig | None`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section_of(inner))), None)


def walk_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, including sections."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from walk_keys(inner, f"{prefix}{name}.")


def suggest(key: str) -> str:
    """Return `; did you mean ...?` for an unknown dotted key, or the list of its section's keys."""
    known = list(walk_keys())
    leaf = key.rsplit(".", 1)[-1]
    if (usual := USUAL_NAMES.get(leaf)) is not None:
        return f"; did you mean {usual}?"
    parent = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    elsewhere = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    by_leaf = {k.rsplit(".", 1)[-1]: k for k in siblings}
    close = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.6)]
    close = close or elsewhere[:3] or difflib.get_close_matches(key, known, n=2, cutoff=0.7)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    where = parent or "the top level"
    return (
        f"; keys of {where}: {', '.join(sorted(by_leaf, key=lambda name: (level(by_leaf[name]), name)))}"
        if by_leaf
        else ""
    )


# Other trainers' names of keys, where megarl's name and section are not similar.
USUAL_NAMES = {
    "learning_rate": "trainer.optimizer.lr",
    "num_generations": "batch.samples_per_group",
    "group_size": "batch.samples_per_group",
    "max_steps": "run.steps",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "kl_coef": "algorithm.kl.coef",
    "tensor_parallel_size": "trainer.parallel.tensor",
    "context_parallel_size": "trainer.parallel.context",
    "output_dir": "run.dir",
}

_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "not_finite": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path (a string)",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section (key: value lines)",
    "model_attributes_type": "a section (key: value lines)",
}


def explain(detail: ErrorDetails, tree: Tree | None = None) -> str:
    """Return one pydantic error as `key: problem; fix`; `tree`: the values of the whole config."""
    key = ".".join(str(part) for part in detail["loc"])
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = dict(detail.get("ctx") or {})
    if kind == "not_finite":
        key, value = f"{key}.{context['name']}", context["value"]
    if kind == "extra_forbidden":
        plain = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
        advice = advice_on(plain, tree or {})
        return f"{key}: no such key{suggest(plain) if advice is None else f'; {advice}'}"
    if kind == "missing":
        return f"{key}: required; {_meaning(detail['loc'])}"
    if kind in _TYPES:
        quote = "; put it in quotes" if kind == "string_type" and not isinstance(value, dict | list) else ""
        return f"{key}: must be {_TYPES[kind]}, not {value!r}{quote}"
    if kind == "literal_error":
        return f"{key}: must be one of {context['expected']}, not {value!r}"
    bounds = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "greater than"),
              "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}  # fmt: skip
    if kind in bounds:
        name, words = bounds[kind]
        return f"{key}: must be {words} {context[name]}, not {value!r}"
    return f"{key}: {detail['msg']} (got {value!r})"


def _meaning(loc: tuple[int | str, ...]) -> str:
    """Return the description of a missing key."""
    section: type[BaseModel] = Config
    text = "add it"
    for part in loc:
        field = section.model_fields.get(str(part))
        if field is None:
            continue
        inner = section_of(field.annotation)
        text = field.description or (inner.__doc__ if inner else None) or text
        section = inner or section
    return " ".join(text.split())
