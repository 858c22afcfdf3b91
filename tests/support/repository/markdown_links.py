"""Links between Markdown files: each relative one must lead to a file of the checkout, and to an anchor that it has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_HTML_ID = re.compile(r"<\w+[^>]*?\s(?:id|name)=\"([^\"]+)\"")
_HTML_TARGET = re.compile(r"<\w+[^>]*?\s(?:src|srcset|href)=\"([^\"]+)\"")


def broken_links(files: Iterable[Path], root: Path) -> list[str]:
    """`file: target: what is wrong` for each relative link or image of `files`."""
    return [
        f"{file.relative_to(root)}: {target}: {problem}"
        for file in files
        for target in targets_of(file)
        if (problem := _problem(file, target, root))
    ]


def targets_of(file: Path) -> list[str]:
    """The targets of links and images of a file, in Markdown and in HTML; without addresses of other hosts."""
    found = []
    for token in _tokens(file):
        if token.type in ("link_open", "image"):
            found.append(str(token.attrs.get("href") or token.attrs["src"]))
        elif token.type in ("html_inline", "html_block"):
            found += _HTML_TARGET.findall(token.content)
    return [target for target in found if not urlsplit(target).scheme]


@cache
def anchors_of(file: Path) -> frozenset[str]:
    """The anchors of a file: GitHub's names of its headings, and the ids of its HTML."""
    anchors, times = set(), Counter[str]()
    for before, token in pairwise(_tokens(file)):
        if before.type == "heading_open":
            name = _github_anchor(token)
            anchors.add(f"{name}-{times[name]}" if times[name] else name)
            times[name] += 1
        if token.type in ("html_inline", "html_block"):
            anchors |= set(_HTML_ID.findall(token.content))
    return frozenset(anchors)


def _github_anchor(heading: Token) -> str:
    words = "".join(each.content for each in heading.children or [] if each.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def _problem(file: Path, target: str, root: Path) -> str | None:
    path, _, anchor = target.partition("#")
    to = (file.parent / unquote(path)).resolve() if path else file
    if not to.is_relative_to(root.resolve()) or not to.exists():
        return "no such file or folder"
    if anchor and to.suffix == ".md" and anchor not in anchors_of(to):
        return "no such anchor"
    return None


@cache
def _tokens(file: Path) -> tuple[Token, ...]:
    """The tokens of a file; an inline token is followed by those inside it."""
    return tuple(each for token in _MARKDOWN.parse(file.read_text()) for each in (token, *(token.children or [])))


def rendered_tags(text: str, tags: Iterable[str]) -> dict[str, int]:
    """The number of elements of each tag in a page, as a renderer of CommonMark with tables makes it."""
    return count_tags(_MARKDOWN.render(text), tags)


def count_tags(html: str, tags: Iterable[str]) -> dict[str, int]:
    """The number of elements of each tag in HTML."""
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in tags}
