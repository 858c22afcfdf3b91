"""One config for two trees: the names that its keys have in each, and the keys that only one of them has.

A tree is known by its page that lists all keys; so nothing here depends on its modules.
"""

import copy
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megarl.config.loading.removed_keys import without_removed
from tests.support.checkout import ROOT

# Old to new, by dotted key; sections too. A tree whose page has the old name gets the old one.
RENAMED = {
    "door": "gateway",
    "telemetry.metrics_gib": "telemetry.keep_gib",
    "telemetry.events.mib": "telemetry.events_mib",
    **{
        f"monitor.{rule}": f"monitor.rules.{rule}"
        for rule in ("ess", "k3_kl", "ratio_tail", "logprob_gap", "replica_gap", "truncated", "no_signal", "entropy")
    },
}
# What a config of b761bc2e may say and one of this tree may not, alongside names that are renamed.
REMOVED_VALUES: dict[str, Any] = {
    "agent": {"act_attempts": 3},
    "checkpoint": {"keep_best_mode": "max"},
    "rollout": {"back_pressure": True},
    "telemetry": {"samples_gib": 1.0, "metrics_gib": 1.0, "events": {"mib": 16.0}},
    "timeouts": {"queue_s": 60.0},
    "trainer": {"idle_logprobs": True},
    "monitor": {"entropy": {"threshold": 0.001, "patience": 4, "action": "warn"}},
    "door": {"enabled": True, "max_sessions": 100},
}
# The page that lists the keys of a tree: its name today, and in older trees.
PAGES = ("docs/reference/keys.md", "docs/configuration.md")
_HEADING, _ROW = re.compile(r"^## `([\w.\[\]]+)`"), re.compile(r"^\| `(\w+)` \|")


def keys_of(root: Path) -> set[str]:
    """Return the sections and the dotted keys of a tree, by its page; none if it has no such page."""
    keys, section = set(), ""
    pages = [path for name in PAGES if (path := root / name).is_file()]
    for line in pages[0].read_text().splitlines() if pages else ():
        if heading := _HEADING.match(line):
            section = heading[1].replace("[]", "")
            keys.add(section)
        elif (row := _ROW.match(line)) and section:
            keys.add(f"{section}.{row[1]}")
    return keys


def renamed_for(keys: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the names that a tree with these keys has for what another one calls differently."""
    result = copy.deepcopy(dict(config))
    for old, new in RENAMED.items():
        source, target = (new, old) if old in keys else (old, new)
        found, value = _pop(result, source.split("."))
        if found:
            *parents, leaf = target.split(".")
            section = result
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = value
    return result


def for_this_tree(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an older tree as its user rewrites it: with the new names, and without what is gone."""
    return without_removed(renamed_for(keys_of(ROOT), config))


def known_part(keys: Collection[str], config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a config that has every default, RUN_DIR/config.yaml, without what a tree with these keys has not."""
    kept = {}
    for name, value in config.items():
        key = f"{section}.{name}".lstrip(".")
        if key not in keys:
            continue
        # What the page does not list one by one is kept whole: rules, fields of Megatron's, arguments of functions.
        is_section = isinstance(value, Mapping) and any(f"{key}.{each}" in keys for each in value)
        kept[name] = known_part(keys, value, key) if is_section else value
    return kept


def _pop(tree: dict[str, Any], path: list[str]) -> tuple[bool, Any]:
    """Remove what is at `path`, if there is something."""
    *parents, leaf = path
    for parent in parents:
        if not isinstance(tree := tree.get(parent, {}), dict):
            return False, None
    return leaf in tree, tree.pop(leaf, None)
