"""No name and no link leads out of a directory; the links of the Hugging Face cache are followed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.files import inside, refuse_outside_links


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A directory with a file, and a secret alongside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "secret").write_text("key")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "", ".", "a\0b"])
def test_names_that_lead_outside(name: str, places: Path) -> None:
    with pytest.raises(ValueError, match="is not the name of a file inside"):
        inside(places, name)


def test_names_inside(places: Path) -> None:
    assert inside(places, "config.json") == places / "config.json"
    assert inside(places, "sub/missing") == places / "sub/missing"


def test_links(places: Path) -> None:
    (places / "alias.json").symlink_to("config.json")
    refuse_outside_links(places)
    assert inside(places, "alias.json").read_text() == "{}"
    (places / "tokenizer.json").symlink_to("../secret")
    for refused in (lambda: inside(places, "tokenizer.json"), lambda: refuse_outside_links(places)):
        with pytest.raises(
            ValueError, match=r"tokenizer.json is a link to .*secret, outside .*model; only files inside"
        ):
            refused()


def test_a_linked_directory_inside(places: Path) -> None:
    (places / "sub").symlink_to(places.parent)
    with pytest.raises(ValueError, match="outside"):
        inside(places, "sub/secret")


def test_a_directory_that_is_itself_a_link(places: Path) -> None:
    """The user has named it, so the link is the user's own."""
    (places.parent / "link").symlink_to(places)
    assert inside(places.parent / "link", "config.json").read_text() == "{}"


def test_the_cache_of_hugging_face(tmp_path: Path) -> None:
    model = tmp_path / "hub/models--org--name"
    snapshot = model / "snapshots/0123"
    (model / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "blobs/aaaa").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/aaaa")
    (tmp_path / "hub/secret").write_text("key")
    refuse_outside_links(snapshot)
    assert inside(snapshot, "config.json").read_text() == "{}"
    (snapshot / "vocab.json").symlink_to("../../../secret")
    with pytest.raises(ValueError, match="outside"):
        refuse_outside_links(snapshot)


def test_snapshots_of_another_cache_are_no_exception(tmp_path: Path) -> None:
    snapshot = tmp_path / "mine/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "mine/secret").write_text("key")
    (snapshot / "vocab.json").symlink_to("../../secret")
    with pytest.raises(ValueError, match="outside"):
        inside(snapshot, "vocab.json")


@pytest.mark.parametrize("target", ["..", "../missing"])
def test_links_to_directories_and_to_nothing_are_refused_too(places: Path, target: str) -> None:
    (places / "sub").symlink_to(target)
    with pytest.raises(ValueError, match="outside"):
        refuse_outside_links(places)


@given(name=st.lists(st.sampled_from(["..", ".", "a", "link", "up", "", "b"]), max_size=6).map("/".join))
def test_no_name_leads_outside(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "confined"
    if not root.exists():
        (root / "a/b").mkdir(parents=True)
        (root / "a/link").symlink_to(root)
        (root / "link").symlink_to("a")
        (root / "a/up").symlink_to("../..")
        (root / "up").symlink_to("/")
    try:
        found = inside(root, name)
    except ValueError:
        return
    assert found.resolve().is_relative_to(root)
