"""Names of verl's fully asynchronous trainer, which a config may use for keys of megarl with the same meaning.

They are translated before anything is validated, so that a resolved config has megarl's names only. The two names of
`admission` that need a formula (`trigger_parameter_sync_step`, `staleness_threshold`) are keys of the schema.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.common.errors import ConfigError
from megarl.config.verl_corrections import CORRECTION_TARGETS, correction_values

Tree = dict[str, Any]

# Where verl's names of a correction may stand.
CORRECTION_SECTIONS = ("algorithm", "algorithm.correction")


def _same(value: object) -> object:
    return value


def _old_logprobs(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return "rollout" if value else "trainer"


@dataclass(frozen=True)
class _Alias:
    """`key`: where verl's name may stand; `target`: the key of megarl; `convert`: its value there, or ValueError."""

    key: str
    target: str
    convert: Callable[[object], object] = _same


ALIASES = (
    _Alias("admission.require_batches", "trainer.mini_batches"),
    _Alias("admission.partial_rollout", "rollout.partial_rollout"),
    *(
        _Alias(f"{section}.use_rollout_log_probs", "algorithm.old_logprobs", _old_logprobs)
        for section in ("admission", "algorithm")
    ),
    *(
        _Alias(f"{section}.{name}", target)
        for section in CORRECTION_SECTIONS
        for name, target in CORRECTION_TARGETS.items()
    ),
)
# Names without a key that says the same, and why.
REFUSED = {
    "rollout_is_batch_normalize": "weights are not divided by their mean, which would undo what a low mean tells; "
    "`algorithm.correction.cap` bounds them",
    "bypass_mode": "the ratio to the engine's log-probs is `algorithm.old_logprobs`: rollout with "
    "`algorithm.correction.kind`: none",
}


def translate(tree: Tree) -> Tree:
    """Return a copy of a config's plain values with megarl's keys instead of verl's.

    Raises ConfigError that lists every name whose value has no equivalent, or differs from that of megarl's own key.
    """
    result = copy.deepcopy(tree)
    problems = [*_count_fetches(result)]
    for name in CORRECTION_SECTIONS:
        section, _ = _section(result, f"{name}.")
        for alias, value in _correction_values(section, name, problems):
            problems += _put(result, alias, value)
    for alias in ALIASES:
        section, name = _section(result, alias.key)
        if section is None or name not in section:
            continue
        try:
            value = alias.convert(section.pop(name))
        except ValueError as error:
            problems.append(f"{alias.key}: {error}")
            continue
        problems += _put(result, alias, value)
    if problems:
        raise ConfigError(problems)
    return result


def target_of(name: str) -> str | None:
    """Return megarl's key for a name of verl without its section; None if it is none."""
    return next((alias.target for alias in ALIASES if alias.key.rsplit(".", 1)[-1] == name), None)


def _correction_values(section: Tree | None, name: str, problems: list[str]) -> Iterator[tuple[_Alias, object]]:
    """Yield megarl's keys and values for verl's names of a correction, which are taken out of their section."""
    if section is None:
        return
    try:
        values = list(correction_values(section))
    except ValueError as error:
        problems.append(f"{name}.{error}")
    else:
        for source, target, value in values:
            yield _Alias(f"{name}.{source}", f"algorithm.correction.{target}"), value
    for each in CORRECTION_TARGETS:
        section.pop(each, None)


def _put(tree: Tree, alias: _Alias, value: object) -> Iterator[str]:
    """Set the key that an alias stands for; yield the problem if it has another value."""
    *parents, leaf = alias.target.split(".")
    section: Any = tree
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            return  # the validation of the section says what it must be
    if leaf in section and section[leaf] != value:
        yield f"{alias.key}: it means {alias.target}: {value}, which is given as {section[leaf]}; remove one of them"
        return
    section[leaf] = value


def _section(tree: Tree, key: str) -> tuple[Tree | None, str]:
    """Return the section of a dotted key and its last part; None if there is no such section."""
    *parents, leaf = key.split(".")
    section: Any = tree
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else None), leaf


def _count_fetches(tree: Tree) -> Iterator[str]:
    """Replace verl's interval in fetches by one in updates, if the updates of a fetch are given beside it."""
    section, _ = _section(tree, "admission.require_batches")
    if section is None:
        return
    updates, fetches = section.get("require_batches"), section.get("trigger_parameter_sync_step")
    if type(updates) is not int or type(fetches) is not int:
        return
    interval = section.get("sync_interval")
    if interval is not None and interval != updates * fetches:
        yield (
            f"admission.trigger_parameter_sync_step: {fetches} fetches of require_batches={updates} updates are "
            f"sync_interval: {updates * fetches}, which is given as {interval}; remove one of them"
        )
        return
    section["sync_interval"] = updates * fetches
    del section["trigger_parameter_sync_step"]
