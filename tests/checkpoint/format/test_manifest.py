"""The manifest of a checkpoint: damage is found, and its file named."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, FileEntry, Manifest, write_durably
from megarl.checkpoint.save.directory import CheckpointDirectory
from tests.support.checkpoints.sample_checkpoints import make_checkpoint, verify


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "manifest"])
def test_damage_is_found_and_its_file_named(directory: CheckpointDirectory, damage: str) -> None:
    path = make_checkpoint(directory, 2, bytes(range(256)) * 100)
    assert verify(path) == []
    target = path / (MANIFEST if damage == "manifest" else "shard")
    content = bytearray(target.read_bytes())
    if damage == "flipped":
        content[12345] ^= 1
        target.write_bytes(content)
    elif damage == "missing":
        target.unlink()
    else:
        target.write_bytes(content[:-10])
    [problem] = verify(path)
    assert str(target) in problem


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_every_file_is_verified_by_exactly_one_rank(sizes: dict[str, int], ranks: int) -> None:
    manifest = Manifest(1, {name: FileEntry(size, "") for name, size in sizes.items()})
    shares = [manifest.share(rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_unreadable_manifest_of_another_version(directory: CheckpointDirectory) -> None:
    path = make_checkpoint(directory, 2)
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(DamagedCheckpointError, match="format 99"):
        Manifest.read(path)
    assert os.path.isdir(path)


def test_what_a_killed_writer_has_left_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if (child := os.fork()) == 0:
        os.replace = lambda *paths: os._exit(9)  # type: ignore[assignment]
        write_durably(path, b"cut off")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and not path.exists() and any(tmp_path.iterdir())
    write_durably(path, b"whole")
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"] and path.read_bytes() == b"whole"
