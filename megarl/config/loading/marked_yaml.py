"""A config as YAML: lines for what the user has set, and comments with each section's defaults. Basic keys first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from megarl.config.loading.key_levels import level, ordered
from megarl.config.schema import Config

WIDTH = 100
FROM_AUTO = "  # the plan's choice for auto"


def marked_yaml(given: Config, resolved: Config, *, whole: bool = True) -> str:
    """Return YAML that `load_config` reads to a config with the values of `resolved`.

    `given`: the config as loaded, which knows what file and overrides set. Values that the plan chose for `auto` are
    lines too, marked as such. `whole`: with the defaults.
    """
    return "".join(f"{line}\n" for line in _lines(given, resolved, whole))


def _lines(given: BaseModel, resolved: BaseModel, whole: bool, prefix: str = "") -> Iterator[str]:
    """Yield the lines of a section: what is set and, if `whole`, comments with all other defaults.

    `prefix`: the section's key and a dot.
    """
    plain, indent = resolved.model_dump(mode="json"), "  " * prefix.count(".")
    defaults: dict[str, list[str]] = {"basic": [], "expert": []}
    for name in ordered(type(resolved), prefix):
        own, value = getattr(given, name), getattr(resolved, name)
        if isinstance(value, BaseModel) and isinstance(own, BaseModel):
            if _is_set(own) or own != value:
                yield f"{indent}{name}:"
                yield from _lines(own, value, whole, f"{prefix}{name}.")
            else:
                defaults[level(prefix + name)].append(f"{name}: {_flow(plain[name])}")
        elif own != value:
            yield from (f"{indent}{line}{FROM_AUTO}" for line in _block({name: plain[name]}))
        elif name in given.model_fields_set:
            shown = given.model_dump(mode="json", include={name}, exclude_unset=True)
            yield from (f"{indent}{line}" for line in _block(shown))
        else:
            defaults[level(prefix + name)].append(f"{name}: {_flow(plain[name])}")
    for each, values in defaults.items() if whole else ():
        if values and prefix:
            yield from _comment(f"{'expert default' if each == 'expert' else 'default'}: {', '.join(values)}", indent)
        else:
            yield from (line for value in values for line in _comment(value, indent))


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _is_set(section: BaseModel) -> bool:
    """Return whether the user has set any key of a section, or of one inside it."""
    values = [getattr(section, name) for name in section.model_fields_set]
    return any(not isinstance(value, BaseModel) or _is_set(value) for value in values)


def _block(values: dict[str, Any]) -> list[str]:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH).splitlines()


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=True)
    return text.strip().removesuffix("...").strip()
