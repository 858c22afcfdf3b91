"""The documentation: the site builds, which checks its links, and links to other files of the checkout lead there."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
VARIABLE = "MEGARL_DOCS_PACKAGES"


class _SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


_SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def site_config() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _SiteLoader)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_pages_outside_the_site_lead_to_files(name: str) -> None:
    """Those of docs/ are checked by the build."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert [each for each in targets if not (ROOT / each).exists()] == []


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
        ("[a](async.md) [b](../docs/training/async.md) [c](../gone.md)", None),
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


def test_what_a_person_reads_can_be_read() -> None:
    """Pages grow by a sentence at a time; what is looked up, and mostly generated, is in docs/reference."""
    read = [page for page in PAGES if DOCS / "reference" not in page.parents]
    assert sum(page.stat().st_size for page in read) <= 250 * 1024, "cut what is said twice"


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


def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(packages: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": packages, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in PAGES:
        html = (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).read_text()
        loaded = re.findall(
            r"<(?:script|img|link rel=\"(?:stylesheet|preconnect)\")[^>]*(?:src|href)=\"([^\"]*)\"", html
        )
        assert loaded and not [each for each in loaded if re.match(r"(?:https?:)?//", each)], "loads from other hosts"
        assert "md-source" in html and 'data-md-component="source"' not in html, "its script asks the code host"
