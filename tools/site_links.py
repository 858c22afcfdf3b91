"""MkDocs hooks (`mkdocs.yml`): links from docs/ to other repository files lead to the code host.

In the sources these links are relative (`../SECURITY.md#sandbox`), which works in a checkout and on the code host. The
site has only the files in docs/, so there such a link becomes a URL below `repo_url`. A link to a missing file is left
as is, and MkDocs reports it. Pages send no requests to the code host.
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
# The target of a Markdown link or image: `](target)`.
_TARGET = re.compile(r"(?<=\]\()(\.\./[^)\s#]*)((?:#[^)\s]*)?)(?=\))")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File


class _SiteConfig(Protocol):
    docs_dir: str
    repo_url: str


def on_page_markdown(markdown: str, page: _Page, config: _SiteConfig, **_: object) -> str:
    """Return a page's source with links out of docs/ rewritten; MkDocs calls this for each page."""
    docs = Path(config.docs_dir)
    return rewritten(markdown, posixpath.dirname(page.file.src_uri), docs, config.repo_url.rstrip("/"))


def on_post_page(output: str, **_: object) -> str:
    """Remove the attribute that makes a page fetch stars from the code host; MkDocs calls this for each page."""
    return output.replace(' data-md-component="source"', "")


def rewritten(markdown: str, folder: str, docs: Path, repository: str) -> str:
    """Return `markdown` with links out of `docs` as URLs below `repository`.

    `folder`: the page's, relative to `docs`. Code is left as is.
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
    """Yield a source's pieces in order, and whether each is code."""
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
