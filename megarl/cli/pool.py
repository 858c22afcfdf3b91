"""`megarl pool`: list, drain, remove and add the rollout engines of a live run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.cluster.client.pool_commands import Action

COLUMNS = ("replica", "node", "state", "devices", "version", "running", "waiting")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `pool` to the `megarl` command."""
    pool = commands.add_parser(
        "pool",
        help="list, drain, remove or add the rollout engines of a live run",
        description="Change the pool of rollout engines during a run. No response is lost: another engine continues "
        "those of a drained or removed one from their last token. A new engine serves after the next publication of "
        "the weights. With exit status 2 the reason is printed.",
        epilog="Run it as the user of the run on one of its hosts; elsewhere the error names one.",
    )
    actions = pool.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _action(
        actions, "list", "show every engine: node, state, devices, weight version, requests",
        "Show every engine. States: serving; starting and joining (it waits for the next publication); drained; lost; "
        "leaving.",
    )  # fmt: skip
    listing.add_argument("--json", action="store_true", help="machine-readable")
    drain = _action(
        actions, "drain", "give an engine no more work; it stays in the pool",
        "Give an engine no more work. Other engines continue its responses. It keeps its devices and takes part in "
        "publications until it is removed, or serves again after --undo.",
    )  # fmt: skip
    _add_replica(drain)
    drain.add_argument("--undo", action="store_true", help="let it serve again, after the next publication")
    remove = _action(
        actions, "remove", "drain an engine, end it and free its devices",
        "Drain an engine, leave it out of the next publication, end it and free its devices. The last engine that "
        "serves cannot be removed.",
    )  # fmt: skip
    _add_replica(remove)
    add = _action(
        actions, "add", "start further engines",
        "Start more engines where Ray has room: in place of removed engines, in room that rollout.max_replicas "
        "reserves, and on nodes added to the cluster of ray.address.",
    )  # fmt: skip
    add.add_argument("count", nargs="?", type=int, default=1, metavar="K", help="how many (default: %(default)s)")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="longest wait in seconds (default: from the run's timeouts)"
    )
    parser.set_defaults(run=run, action=name)
    return parser


def _add_replica(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("replica", type=int, metavar="N", help="its number in `megarl pool list`")


def run(options: argparse.Namespace) -> int:
    """Do one action and print its outcome. Raises ConfigError with the fix if it cannot be done."""
    from megarl.cluster.client.pool_commands import ask_pool

    action: Action = "undrain" if getattr(options, "undo", False) else options.action
    number = options.count if action == "add" else getattr(options, "replica", 0)
    answer = ask_pool(
        options.run_dir, action, number, timeout_s=options.timeout,
        say=lambda text: sys.stderr.write(f"megarl: {text}\n"),
    )  # fmt: skip
    if action != "list":
        sys.stdout.write(f"{answer}\n")
    elif options.json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        sys.stdout.write(render(answer["replicas"], answer["missing"]))
    return 0


def render(replicas: Sequence[dict[str, Any]], missing: int) -> str:
    """Return the list of replicas as a table for people."""
    rows = [COLUMNS, *(_row(each) for each in replicas)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if missing:
        lines.append(f"{missing} more were lost with their node and restart when there is room")
    return "\n".join(lines) + "\n"


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    devices = ", ".join(replica["devices"])
    known = (replica["host"] or "?", replica["state"], devices or "-", replica["version"] or "-")
    return (str(replica["replica"]), *known, str(replica["running"]), str(replica["waiting"]))
