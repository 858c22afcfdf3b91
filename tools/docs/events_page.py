"""Generates docs/reference/events.md from the declarations of events."""

from __future__ import annotations

from megarl.telemetry.trace.kinds import FAULTS, KINDS

_HEAD = """# Events

<!-- Generated from megarl/telemetry/trace/kinds.py by `make docs`; do not edit. -->

What the processes of a run write to `RUN_DIR/events`, and `megarl trace` draws
([how to use them](../observability.md#events-and-traces)). The stream decides how long an event is kept. The line is
that of the process in a trace; without one, each sample has its own.

| event | stream | line | meaning | arguments |
|---|---|---|---|---|
"""

_FAULTS = """
## Kinds of faults

A `fault` and the `recovery` that ends it have the same `kind`. `rule` names an alarm of the
[monitor](../observability/monitor.md), and is absent from all others.

| kind | meaning |
|---|---|
"""


def events_page() -> str:
    """Return the whole page in Markdown."""
    parts = [_HEAD]
    for kind in KINDS.values():
        arguments = "; ".join(f"`{name}`: {meaning.rstrip('.')}" for name, meaning in kind.args)
        parts.append(f"| `{kind.name}` | {kind.stream} | {kind.track} | {kind.meaning} | {arguments} |\n")
    parts.append(_FAULTS)
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in FAULTS.items()]
    return "".join(parts)
