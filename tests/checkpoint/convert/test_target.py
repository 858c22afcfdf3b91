"""A conversion never writes over its source, nor over files that are not known to it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megarl.checkpoint.convert import hf_to_megatron as importing
from tests.support.checkpoints.converter import (
    convert,
    files_of,
    refused,
    run,
    run_forked,
    wait_for_lock,
)


@pytest.fixture
def source(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(model_dir("qwen3"), tmp_path / "models/hf")
    return tmp_path / "models/hf"


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    convert("import", "--hf", source, "--out", tmp_path / "models/m")
    return tmp_path / "models/m"


def killed(point: str, *arguments: Any, marks: Path) -> None:
    """Run a command until it is killed at the point."""
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    assert run_forked(*arguments, "--workers", 1, KILL_AT=point, KILL_MARKS=str(marks)) == -9


@pytest.mark.parametrize("out", ["hf", ".", "../models/hf", "hf/model.safetensors", "link"])
def test_an_import_over_its_source(out: str, source: Path) -> None:
    (source.parent / "link").symlink_to(source)
    before = files_of(source)
    err = refused("import", "--hf", source, "--out", source.parent / out, "--force")
    assert "overlap" in err and str(source) in err
    assert files_of(source) == before


@pytest.mark.parametrize("out", ["m", ".", "m/release", "m/hf", "m/release/hf"])
def test_an_export_over_its_source(out: str, megatron: Path) -> None:
    before = files_of(megatron)
    for source in (megatron, megatron / "release"):
        if out != "m/hf" or source == megatron:
            assert "overlap" in refused("export", "--megatron", source, "--hf", megatron.parent / out, "--force")
    assert files_of(megatron) == before


def test_an_import_over_what_its_source_links_to(source: Path, tmp_path: Path) -> None:
    """The Hugging Face cache has such links: a snapshot's files are links to blobs."""
    (tmp_path / "blobs").mkdir()
    shutil.move(source / "model.safetensors", tmp_path / "blobs/weights")
    (source / "model.safetensors").symlink_to(tmp_path / "blobs/weights")
    assert "overlap" in refused("import", "--hf", source, "--out", tmp_path / "blobs", "--force")
    assert (tmp_path / "blobs/weights").stat().st_size > 10**5


def test_an_output_that_appears_during_the_conversion(source: Path, tmp_path: Path) -> None:
    """Without --force it is not replaced. When the user has moved it away, the conversion goes on."""
    out = tmp_path / "out"
    command = ["import", "--hf", source, "--out", out]
    killed("metadata", *command, marks=tmp_path / "marks")
    wait_for_lock(out)
    out.mkdir()
    (out / "precious").write_text("mine")
    err = refused(*command, "--resume")
    assert f"{out} has appeared since the conversion began" in err
    assert files_of(out) == {"precious": b"mine"}
    out.rename(tmp_path / "aside")
    assert "of it before the resume" in convert(*command, "--resume")
    assert files_of(tmp_path / "aside") == {"precious": b"mine"}


def test_an_output_that_appears_just_before_the_commit(source: Path, tmp_path: Path) -> None:
    out, finish = tmp_path / "out", importing.HFToMegatron.finish

    def slow(job: Any, *arguments: Any) -> None:
        finish(job, *arguments)
        out.write_text("mine")

    with mock.patch.object(importing.HFToMegatron, "finish", slow):
        assert "has appeared" in refused("import", "--hf", source, "--out", out)
    assert out.read_text() == "mine"


def test_force_lasts_through_a_resume_but_replaces_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    command = ["import", "--hf", source, "--out", out]
    killed("metadata", *command, "--force", marks=tmp_path / "marks")
    wait_for_lock(out)
    assert list(files_of(out)) == ["old"]
    convert(*command, "--resume")
    assert (out / "release/.metadata").is_file() and not (out / "old").exists()

    killed("rename", *command, "--force", marks=tmp_path / "marks")
    wait_for_lock(out)
    out.rename(tmp_path / ".out.converting/old")  # as if killed between the two renames
    out.mkdir()
    assert "has appeared" in refused(*command, "--resume")


@pytest.mark.parametrize("removed", range(1, 7))  # the first is of the plan before this one
def test_killed_while_the_leftovers_are_removed(removed: int, source: Path, tmp_path: Path) -> None:
    """After any number of removals the output is complete; a resume says so and removes the rest."""
    out, command = tmp_path / "out", ["import", "--hf", source, "--out", tmp_path / "out", "--workers", 1]
    with stopped_after(removed):
        assert run(*command)[0] == 1
    before = files_of(out)
    assert (tmp_path / ".out.converting/plan.json").is_file()
    assert "is complete already" in convert(*command, "--resume")
    assert files_of(out) == before and sorted(path.name for path in tmp_path.iterdir()) == ["models", "out"]


@pytest.mark.parametrize("removed", range(3))
def test_killed_while_an_unfinished_conversion_is_forgotten(removed: int, source: Path, tmp_path: Path) -> None:
    """A conversion whose files were partly removed is not taken for a complete one."""
    out = tmp_path / "out"
    command = ["import", "--hf", source, "--out", out, "--workers", 1]
    killed("metadata", *command, marks=tmp_path / "marks")
    wait_for_lock(out)
    with stopped_after(removed):
        assert run(*command, "--force")[0] == 1
    code, said, err = run(*command, "--resume")
    assert (code == 0 and (out / "release/.metadata").is_file()) or "start again with --force" in err
    assert "complete already" not in said
    convert(*command, "--force")


@contextmanager
def stopped_after(removals: int) -> Iterator[None]:
    """Removals of files and directories in a work directory fail after so many, as if the process had been killed."""
    unlink, rmtree, left = Path.unlink, shutil.rmtree, [removals]

    def count(path: Path) -> None:
        if Path(path).parent.name == ".out.converting" and not Path(path).name.startswith("."):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("killed")

    def unlink_with(self: Path, *arguments: Any, **options: Any) -> None:
        count(self)
        unlink(self, *arguments, **options)

    def rmtree_with(path: Path, *arguments: Any, **options: Any) -> None:
        count(path)
        rmtree(path, *arguments, **options)

    with mock.patch.object(Path, "unlink", unlink_with), mock.patch("shutil.rmtree", rmtree_with):
        yield


def test_a_dangling_link_is_an_output_that_exists(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    assert "exists already" in refused("import", "--hf", source, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "out"]
    convert("import", "--hf", source, "--out", out, "--force")
    assert (out / "release").is_dir() and not os.path.islink(out) and not (tmp_path / "nowhere").exists()
    assert run("verify", source, out)[0] == 0
