"""The hooks of .pre-commit-config.yaml have nothing to say about the repository, by small checks of the same rules."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from tests.support.checkout import ROOT

LARGEST_KIB = 500  # the default of check-added-large-files
CONFLICT = re.compile(rb"^(?:<<<<<<< |======= |=======\r?$|>>>>>>> )", re.MULTILINE)


def is_text(content: bytes) -> bool:
    return b"\0" not in content


def ends_well(name: str, content: bytes, args: list[str]) -> bool:
    """Ends with one newline, and is not that newline alone."""
    return not is_text(content) or content == b"" or (content.endswith(b"\n") and content[-2:] not in (b"\n", b"\n\n"))


def has_no_trailing_space(name: str, content: bytes, args: list[str]) -> bool:
    return not is_text(content) or all(line == line.rstrip() for line in content.splitlines())


def is_yaml(name: str, content: bytes, args: list[str]) -> bool:
    """With `--unsafe` the hook only reads the syntax, because a tag may name what is not installed."""
    if not name.endswith((".yaml", ".yml")):
        return True
    try:
        list(yaml.parse(content) if "--unsafe" in args else [yaml.safe_load(content)])
    except yaml.YAMLError:
        return False
    return True


def is_toml(name: str, content: bytes, args: list[str]) -> bool:
    try:
        tomllib.loads(content.decode() if name.endswith(".toml") else "")
    except tomllib.TOMLDecodeError:
        return False
    return True


def has_no_conflict(name: str, content: bytes, args: list[str]) -> bool:
    return not is_text(content) or not CONFLICT.search(content)


def is_small(name: str, content: bytes, args: list[str]) -> bool:
    return len(content) <= LARGEST_KIB * 1024


RULES: dict[str, Callable[[str, bytes, list[str]], bool]] = {
    "check-added-large-files": is_small,
    "check-merge-conflict": has_no_conflict,
    "check-toml": is_toml,
    "check-yaml": is_yaml,
    "end-of-file-fixer": ends_well,
    "trailing-whitespace": has_no_trailing_space,
}


def read_hooks() -> Iterator[dict[str, Any]]:
    """The hooks of pre-commit-hooks; those of the repository itself are what `make lint` runs."""
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
        if repository["repo"] != "local":
            assert repository["repo"].endswith("/pre-commit-hooks")
            yield from repository["hooks"]


HOOKS = {hook["id"]: hook for hook in read_hooks()}


@cache
def tracked_files() -> Mapping[str, bytes]:
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no clone, so that git does not tell which files belong to the repository")
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_bytes() for name in names}


def offenders(hook: Mapping[str, Any], files: Mapping[str, bytes]) -> list[str]:
    rule, excluded = RULES[hook["id"]], re.compile(hook.get("exclude", "^$"))
    return [
        name for name, content in files.items()
        if not excluded.search(name) and not rule(name, content, hook.get("args", []))
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_passes_on_the_repository(name: str) -> None:
    files = tracked_files()
    assert len(files) > 1000 and {"mkdocs.yml", "tests/__init__.py"} <= set(files)
    assert offenders(HOOKS[name], files) == []


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("end-of-file-fixer", b"\n", b""),
        ("end-of-file-fixer", b"one", b"one\n"),
        ("end-of-file-fixer", b"one\n\n", b"\0no text"),
        ("trailing-whitespace", b"one \ntwo\n", b"one\n two\n"),
        ("check-yaml", b"a: [1\n", b"a: !!python/name:one.two {}\n"),
        ("check-toml", b"a = \n", b"a = 1\n"),
        ("check-merge-conflict", b"a\n=======\nb\n", b"a\n========\nb\n"),
        ("check-added-large-files", bytes(LARGEST_KIB * 1024 + 1), b"a"),
    ],
    ids=lambda given: given if isinstance(given, str) else str(given[:8]),
)
def test_what_a_hook_would_refuse_or_change_is_found(name: str, bad: bytes, good: bytes) -> None:
    suffix = {"check-yaml": "yaml", "check-toml": "toml"}.get(name, "txt")
    assert offenders(HOOKS[name], {f"bad.{suffix}": bad, f"good.{suffix}": good}) == [f"bad.{suffix}"]
