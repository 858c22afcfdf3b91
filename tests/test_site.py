"""The documentation: every page is in the site's navigation, every link leads somewhere, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.checkout import ROOT
from tests.support.repository.markdown_links import anchors_of, broken_links, count_tags, rendered_tags, targets_of

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
# Where a newcomer's path passes, in its order.
PATH = ("index", "quickstart", "families", "data", "rewards", "async", "environments", "launch", "observability")
VARIABLE = "MEGARL_DOCS_PACKAGES"
TAGS = ("h1", "h2", "h3", "li", "ol", "ul", "pre", "table", "tr", "em", "strong", "img")


class _SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


_SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def site_config() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _SiteLoader)


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for to in entry.values():
            yield from [to] if isinstance(to, str) else pages_of(to)


def test_every_page_is_in_the_navigation_once_and_a_newcomers_path_is_in_order() -> None:
    order = list(pages_of(site_config()["nav"]))
    assert sorted(order) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)
    places = [order.index(f"{name}.md") for name in PATH]
    assert places == sorted(places)


def test_the_home_page_leads_to_every_page() -> None:
    home = {target for target in targets_of(DOCS / "index.md") if not target.startswith("..")}
    assert {page.name for page in PAGES} - {"index.md"} <= home


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert broken_links([*PAGES, *OTHERS], ROOT) == []
    assert sum(len(targets_of(page)) for page in PAGES) > 100


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text('# `One.key` & two\n\n## Twice\n\n## Twice\n\n<a id="here"></a>\n')
    page.write_text(
        "[fine](other.md) [a](other.md#onekey--two) [b](other.md#twice-1) [c](other.md#here) [d](https://example.org)\n"
        "`[code](nowhere.md)` [one](nowhere.md) [two](other.md#onekey) ![three](lost.svg) [four](#five)\n\n"
        '<img src="gone.svg">\n'
    )
    assert broken_links([page], tmp_path) == [
        "page.md: nowhere.md: no such file or folder", "page.md: other.md#onekey: no such anchor",
        "page.md: lost.svg: no such file or folder", "page.md: #five: no such anchor",
        "page.md: gone.svg: no such file or folder",
    ]  # fmt: skip
    assert anchors_of(tmp_path / "other.md") == {"onekey--two", "twice", "twice-1", "here"}


# --- links out of docs/, which the site has no pages for


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """tools/ is no package."""
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "tools/site_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOST = "https://host.example/megarl"


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("[a](../SECURITY.md#sandbox)", f"[a]({HOST}/blob/main/SECURITY.md#sandbox)"),
        ("[a](../examples/rl) ![b](../LICENSE)", f"[a]({HOST}/tree/main/examples/rl) ![b]({HOST}/blob/main/LICENSE)"),
        ("[a](async.md) [b](../docs/async.md) [c](../gone.md)", None),
        ("`[a](../Makefile)`, ``[a](../Makefile) ` ``", None),
        ("```\n[a](../Makefile)\n```\n", None),
        ("~~~\n```\n[a](../LICENSE)\n~~~\n[a](../LICENSE)",
         f"~~~\n```\n[a](../LICENSE)\n~~~\n[a]({HOST}/blob/main/LICENSE)"),
    ],
)  # fmt: skip
def test_links_out_of_docs_lead_to_the_repository(hook: ModuleType, source: str, rewritten: str | None) -> None:
    assert hook.rewritten(source, "", DOCS, HOST) == (source if rewritten is None else rewritten)


def test_the_repository_is_that_of_the_package() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert site_config()["repo_url"] == urls["Repository"]


# --- the build itself


@pytest.fixture(scope="module")
def packages() -> str:
    directory = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "docs")
    if not (directory / "mkdocs" / "__init__.py").is_file():
        pytest.skip(
            f"MkDocs is not here: make setup-test, or set {VARIABLE} to a directory made by "
            "pip install --no-deps --target DIR -r requirements/docs.lock"
        )
    return str(directory)


def build(packages: str, config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": packages, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def test_the_site_builds_without_a_warning_and_shows_what_the_code_host_shows(packages: str, tmp_path: Path) -> None:
    done = build(packages, ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in PAGES:
        html = (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).read_text()
        loaded = re.findall(
            r"<(?:script|img|link rel=\"(?:stylesheet|preconnect)\")[^>]*(?:src|href)=\"([^\"]*)\"", html
        )
        assert loaded and not [each for each in loaded if re.match(r"(?:https?:)?//", each)], "loads from other hosts"
        shown = html.split("<article", 1)[1].split("</article>", 1)[0]
        assert count_tags(shown, TAGS) == rendered_tags(page.read_text(), TAGS), page.name


def test_a_broken_anchor_fails_the_build(packages: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n\n[a](#home) [b](#nowhere)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\nhooks: [{ROOT / 'tools/site_links.py'}]\n"
    )
    done = build(packages, config, tmp_path / "site")
    assert done.returncode == 1 and "'#nowhere'" in done.stderr and "'#home'" not in done.stderr, done.stderr
