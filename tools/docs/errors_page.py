"""Generates docs/reference/errors.md: the messages of megarl's source that say what to do, found by reading it.

A message has one of two forms: `key: what is wrong; how to fix it`, which refuses a config, and an error that a part of
a run or of a command raises. What is filled in when it is printed stands here as "…".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import Config

PACKAGE = Path(__file__).resolve().parents[2] / "megarl"
FILLED = "…"
KEY = re.compile(rf"(?:[a-z_]+|{FILLED})(?:\.[a-z_{FILLED}]+)*(?:\[\])?: (?=.{{20}})")
_HEAD = """# What can go wrong

<!-- Generated from the messages in megarl/ by `make docs`; do not edit. -->

The messages that say what to do, as they are printed; "…" stands for what is filled in. Search this page for the words
around it. A config is checked before anything starts, and all its problems are reported at once: `megarl train --config
my.yaml --dry-run` shows them. A run that fails reports one message on the terminal and in `RUN_DIR/error.txt`, with the
log of the process that failed first; `megarl report RUN_DIR` shows what happened before. What a run survives is in
[faults](faults.md), and what its alarms mean in [the monitor](../observability/monitor.md).
"""
# Packages whose errors make one table of the second part, in the order of the page.
_GROUPS = {
    "Installation and machines": ("platforms", "common", "cluster", "cli"),
    "Models and checkpoints": ("models", "checkpoint", "weights"),
    "Data and chat templates": ("data", "chat"),
    "Rollout, agents and tools": ("rollout", "rewards", "tools", "sandbox", "environments", "gateway", "queue"),
    "Training": ("algorithms", "trainer", "run", "telemetry", "evaluation", "report", "config"),
}


def errors_page() -> str:
    """Return the whole page in Markdown."""
    parts, rows = [_HEAD, "\n## Messages about a config\n"], dict.fromkeys(_messages())
    for section in Config.model_fields:
        parts += _table(f"### `{section}`", [text for _, text in rows if re.match(rf"{section}[.:\[]", text)])
    parts += _table("### Any key", [text for _, text in rows if text.startswith(FILLED) and KEY.match(text)])
    parts.append("\n## Messages of a run and of commands\n")
    for title, packages in _GROUPS.items():
        parts += _table(f"### {title}", [text for package, text in rows if package in packages and not KEY.match(text)])
    return "".join(parts)


def _table(title: str, messages: list[str]) -> Iterator[str]:
    if messages:
        yield f"\n{title}\n\n| message | what to do |\n|---|---|\n"
    for text in sorted(dict.fromkeys(messages)):
        problem, fix = _parts(text)
        yield f"| {_cell(problem)} | {_cell(fix)} |\n"


def _parts(text: str) -> tuple[str, str]:
    """Return what is wrong and what to do: they are parted by the first "; " that is not between brackets."""
    ends = [found.start() for found in re.finditer("; ", text)]
    end = next((end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)), len(text))
    return text[:end], text[end + 2 :]


def _messages() -> Iterator[tuple[str, str]]:
    """Yield the package and the text of each message of the source that says what to do."""
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        errors = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        raised = [error.args for error in errors if isinstance(error, ast.Call)]
        texts = {_text(argument) for arguments in raised for argument in arguments}
        texts |= {text for node in ast.walk(tree) if KEY.match(text := _text(node)) and not text.startswith("megarl:")}
        yield from (
            (package, text) for text in (" ".join(each.split()) for each in sorted(texts)) if _says_enough(text)
        )


def _says_enough(text: str) -> bool:
    """True if both parts have words of their own, by which a reader can find the message and act."""
    problem, fix = _parts(text)
    return len(re.findall(r"[a-z]{2,}", problem)) >= 4 and len(re.findall(r"[a-z]{2,}", fix)) >= 2


def _text(node: ast.AST) -> str:
    """Return a text with "…" for what is filled in; "" for what is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or FILLED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and (_text(node.left) or _text(node.right)):
        return (_text(node.left) or FILLED) + (_text(node.right) or FILLED)
    return ""


def _cell(text: str) -> str:
    return re.sub(r"([|<*])", r"\\\1", re.sub(f"{FILLED}+", FILLED, text))
