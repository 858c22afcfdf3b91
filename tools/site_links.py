"""Hooks of MkDocs (`mkdocs.yml`): links from docs/ to other files of the repository lead to the code host, and no page
asks it for anything.

In the sources they are relative (`../SECURITY.md#sandbox`), which is right in a checkout and on the code host. The site
has the files of docs/ only, so there such a link gets an address below `repo_url`. A link to a file that is not there
stays as it is, and MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

BRANCH = "main"
_FENCE = re.compile(r"\s*(```+|~~~+)")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
# The target of a link or an image in Markdown: `](target)`.
_TARGET = re.compile(r"(?<=\]\()(\.\./[^)\s#]*)((?:#[^)\s]*)?)(?=\))")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File


class _SiteConfig(Protocol):
    docs_dir: str
    repo_url: str


def on_page_markdown(markdown: str, page: _Page, config: _SiteConfig, **_: object) -> str:
    """Return a page's source with its links out of docs/ rewritten; called by MkDocs for each page."""
    docs = Path(config.docs_dir)
    return rewritten(markdown, posixpath.dirname(page.file.src_uri), docs, config.repo_url.rstrip("/"))


def on_post_page(output: str, **_: object) -> str:
    """Return a page without the mark that makes its script ask the code host for stars; called by MkDocs for each."""
    return output.replace(' data-md-component="source"', "")


def rewritten(markdown: str, folder: str, docs: Path, repository: str) -> str:
    """Return `markdown` with links out of `docs` as addresses below `repository`.

    `folder`: of the page, relative to `docs`. Code stays as it is.
    """

    def address(match: re.Match[str]) -> str:
        target = (docs / folder / match[1]).resolve()
        root = docs.resolve().parent
        if not target.exists() or not target.is_relative_to(root) or target.is_relative_to(docs.resolve()):
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{repository}/{kind}/{BRANCH}/{target.relative_to(root).as_posix()}{match[2]}"

    return "".join(part if is_code else _TARGET.sub(address, part) for part, is_code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a source in order, and whether each is code."""
    fence = ""
    for line in markdown.splitlines(keepends=True):
        match = _FENCE.match(line)
        if fence or match:
            yield line, True
            if not fence and match:
                fence = match[1]
            elif match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            continue
        at = 0
        for code in _CODE.finditer(line):
            yield line[at : code.start()], False
            yield code[0], True
            at = code.end()
        yield line[at:], False
