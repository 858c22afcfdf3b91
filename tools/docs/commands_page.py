"""Generates docs/reference/commands.md from the parsers of `megarl` and `megarl convert`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megarl.checkpoint.convert.cli import _parser as convert_parser
from megarl.cli.main import build_parser

# In the order in which a user meets them; the parser has no other one.
ORDER = ("train", "launch", "plan", "doctor", "eval", "report", "top", "trace", "replay", "serve", "pool")

_HEAD = """# Commands

<!-- Generated from the command line's parsers by `make docs`; do not edit. -->

`megarl COMMAND --help` prints the same. A `section.key=value` overrides a [key](keys.md) of the config, and may stand
before or after an option. Exit status 0 is success, 1 a failure, 2 a mistake on the command line or in the config, and
130 an interrupted command, unless a command says otherwise.
"""


def commands_page() -> str:
    """Return the whole page in Markdown."""
    parts = [_HEAD]
    commands = dict(_commands(build_parser()))
    for name in (*ORDER, *(each for each in commands if each not in ORDER)):
        parts += _command(f"megarl {name}", commands[name]) if name != "convert" else _convert()
    return "".join(parts)


def _convert() -> Iterator[str]:
    parser = convert_parser("megarl convert", "-m megarl convert")
    yield from _command("megarl convert", parser)


def _command(title: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a command's section, and those of its actions."""
    actions = dict(_commands(parser))
    level = "##" if title.count(" ") == 1 else "###"
    yield f"\n{level} `{title}`\n\n{_text(parser.description)}\n"
    options = [each for each in parser._actions if not isinstance(each, _Skipped)]
    if options:
        yield "\n| argument | meaning |\n|---|---|\n"
        for each in options:
            yield f"| {_name(each)} | {_text(each.help % _values(each, parser) if each.help else '')} |\n"
    for name, action in actions.items():
        yield from _command(f"{title} {name}", action)


_Skipped = (argparse._HelpAction, argparse._SubParsersAction)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _name(action: argparse.Action) -> str:
    """Return how an argument is written, as code."""
    values = [str(each) for each in action.choices or str(action.metavar or action.dest.upper()).split("|")]
    value = values[0] if len(values) == 1 else f"{{{','.join(values)}}}"
    if not action.option_strings:
        repeated = action.nargs in ("*", "+", argparse.REMAINDER)
        return _code(f"{action.metavar or action.dest}{' ...' if repeated else ''}")
    written = ", ".join(action.option_strings)
    return _code(written if action.nargs == 0 else f"{written} {value}")


def _values(action: argparse.Action, parser: argparse.ArgumentParser) -> dict[str, object]:
    return {**vars(action), "prog": parser.prog}


def _code(text: str) -> str:
    return f"`{text}`"  # a "|" would end the cell, and its escape would be shown


def _text(text: str | None) -> str:
    """Return a text on one line, for a table cell."""
    return " ".join((text or "").split()).replace("|", "\\|")
