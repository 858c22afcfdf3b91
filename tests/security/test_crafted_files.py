"""Files that would run code, or lead to other files, when they are read: refused by every reader, with a clear message.

Each is first read by the library's own reader, or by one that joins paths as they are written, which shows that it does
what it is made for.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoConfig
from transformers.utils.hub import get_checkpoint_shard_files

from megarl.chat.tokenize import load_tokenizer
from megarl.checkpoint.convert.cli import open_model
from megarl.checkpoint.convert.verify import content_metadata_of
from megarl.checkpoint.format.manifest import FileEntry, check_files
from megarl.checkpoint.format.mapped_reader import MappedReader
from megarl.checkpoint.format.megatron_files import Chunk, MegatronDirectory, archived_tensor, read_index
from megarl.config.checks.engine import engine_problems
from megarl.config.schema import Config
from megarl.models.hf.directory import HFDirectory, MappedFile
from megarl.models.hf.export import copy_side_files
from megarl.models.hf.model_files import hf_files
from megarl.models.hf.read_config import load_info
from megarl.rollout.engine.engine_args import engine_args
from tests.support.checkpoints.converter import convert, refused
from tests.support.models.family_models import family_models
from tests.support.runs.run import tiny_config
from tests.support.worlds.world import World


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face directory and the Megatron checkpoint of the same model."""
    root = tmp_path_factory.mktemp("models")
    source = family_models(root)("qwen3")
    convert("import", "--hf", source, "--out", root / "megatron")
    return source, root / "megatron"


@pytest.fixture
def hf(models: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(models[0], tmp_path / "hf")


@pytest.fixture
def megatron(models: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(models[1], tmp_path / "megatron")


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def dotted(module: str, name: str, marker: Path) -> bytes:
    """A pickle that calls `module`.`name`(marker), where the name may contain dots."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word for word in (module.encode(), name.encode()))
    path = str(marker).encode()
    return b"\x80\x04" + words + b"\x93\x8c" + bytes([len(path)]) + path + b"\x85R."


def plain(marker: Path) -> bytes:
    return pickle.dumps(Payload(marker))


INDEX_ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "a function": plain,
    "a dotted name of pathlib": lambda marker: dotted("pathlib", "os.mkdir", marker),
    "a dotted name of torch's index": lambda m: dotted("torch.distributed.checkpoint.filesystem", "os.mkdir", m),
    "a dotted name of torch": lambda marker: dotted("torch", "os.mkdir", marker),
    "inside an index": lambda marker: pickle.dumps(Metadata({}, planner_data=Payload(marker), storage_data={})),
}


@contextmanager
def runs(marker: Path) -> Iterator[None]:
    """The unguarded reader in the block runs the file's code. Removes the mark that it leaves."""
    yield
    assert marker.is_dir(), "the file does nothing, so this test shows nothing"
    marker.rmdir()


@contextmanager
def refuses(marker: Path, *words: str) -> Iterator[None]:
    """The reader in the block raises ValueError with these words, and the file's code does not run."""
    with pytest.raises(ValueError) as caught:
        yield
    assert not marker.exists(), "the file's code has run"
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("attack", INDEX_ATTACKS)
def test_an_index_that_runs_code(attack: str, megatron: Path, tmp_path: Path) -> None:
    marker, step = tmp_path / "ran", megatron / "release"
    (step / ".metadata").write_bytes(INDEX_ATTACKS[attack](marker))
    with runs(marker):
        pickle.loads((step / ".metadata").read_bytes())
    for unguarded in (
        FileSystemReader(step).read_metadata,
        lambda: dist_checkpointing.load_tensors_metadata(str(step)),
    ):
        with runs(marker), contextlib.suppress(AttributeError):  # most of these files hold no index
            unguarded()
    for read in (
        lambda: read_index(step),
        lambda: MappedReader(step).read_metadata(),
        lambda: MegatronDirectory(megatron),
        lambda: open_model(megatron),
    ):
        with refuses(marker, str(step / ".metadata"), "is not a readable index", "mkdir"):
            read()
    assert "mkdir" in refused("inspect", megatron) and not marker.exists()


@pytest.mark.world
def test_training_from_a_crafted_checkpoint(
    world: Callable[[int], World], models: tuple[Path, Path], megatron: Path, tmp_path: Path
) -> None:
    """`common.pt` is not read at all; an index that runs code ends the load with a message."""
    marker, step = tmp_path / "ran", megatron / "release"
    torch.save({"args": Payload(marker)}, step / "common.pt")
    with runs(marker):
        torch.load(step / "common.pt", weights_only=False)
    load = "tests.support.ranks.checkpoints.crafted:load"
    arguments = {"path": str(megatron), "model_dir": str(models[0])}
    assert world(1).run(load, **arguments) == [["", ""]]
    assert not marker.exists()
    (step / ".metadata").write_bytes(plain(marker))
    with runs(marker), contextlib.suppress(AttributeError):
        dist_checkpointing.load_tensors_metadata(str(step))
    (messages,) = world(1).run(load, **arguments)
    assert len(messages) == 2 and all("is not a readable index" in each for each in messages) and not marker.exists()


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_from_damaged_shards(
    ranks: int, world: Callable[[int], World], models: tuple[Path, Path], megatron: Path
) -> None:
    """Every rank that reads a damaged shard gets the cause, at a resume every rank; none waits for another one."""
    shard = min((megatron / "release").glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    arguments = {"path": str(megatron), "model_dir": str(models[0])}
    answers = world(ranks).run("tests.support.ranks.checkpoints.crafted:load", timeout=60.0, **arguments)
    assert [len(messages) for messages in answers] == [2] * ranks
    for messages in answers:
        assert "release cannot be loaded: rank 0: " in messages[1], messages
        assert all(shard.name in each and "is damaged" in each for each in messages), messages


def test_a_stored_object_that_runs_code(tmp_path: Path) -> None:
    """The random states of a checkpoint are such objects. torch's planner unpickles them without restriction."""
    marker, step = tmp_path / "ran", tmp_path / "step"
    dcp.save({"rng": Payload(marker), "w": torch.arange(6.0)}, storage_writer=FileSystemWriter(step), no_dist=True)
    state = {"rng": object(), "w": torch.zeros(6)}
    with runs(marker):
        dcp.load(state, storage_reader=FileSystemReader(step), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"\.distcp: rng cannot be read as plain data: .*mkdir"):
        dcp.load(state, storage_reader=MappedReader(step), no_dist=True)
    assert not marker.exists()


def test_plain_objects_are_loaded(tmp_path: Path) -> None:
    saved = {"rng": {"numpy": ("MT", torch.arange(3), 1.5), "none": None}, "w": torch.arange(6.0)}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path / "step"), no_dist=True)
    state: dict[str, Any] = {"rng": {"numpy": (), "none": 1}, "w": torch.zeros(6)}
    dcp.load(state, storage_reader=MappedReader(tmp_path / "step"), no_dist=True)
    assert state["w"].tolist() == saved["w"].tolist() and state["rng"]["none"] is None
    assert repr(state["rng"]) == repr(saved["rng"])


def test_a_shard_whose_tensor_runs_code(tmp_path: Path) -> None:
    marker, shard = tmp_path / "ran", tmp_path / "__0_0.distcp"
    torch.serialization.set_crc32_options(True)
    torch.save(torch.zeros(2), shard)
    content = replaced(shard, plain(marker))
    with runs(marker):
        torch.load(io.BytesIO(content), weights_only=False)
    shard.write_bytes(content)
    with refuses(marker, str(shard), "the archive of w at byte 0 is damaged", "mkdir"):
        archived_tensor(MappedFile(shard), Chunk((0,), (2,), shard.name, 0, len(content)), "w")


def replaced(archive: Path, pickled: bytes) -> bytes:
    """The `torch.save` archive with another pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("/data.pkl") else old.read(name))
    return made.getvalue()


def test_pickled_weights_that_run_code(hf: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (hf / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload(marker)}, hf / "pytorch_model.bin")
    with runs(marker):
        torch.load(hf / "pytorch_model.bin", weights_only=False)
    with refuses(marker, "pickled weights"):
        HFDirectory(hf)


def test_a_common_state_that_runs_code(megatron: Path, tmp_path: Path) -> None:
    marker, step = tmp_path / "ran", megatron / "release"
    torch.save({"content_metadata": Payload(marker)}, step / "common.pt")
    with runs(marker):
        torch.load(step / "common.pt", weights_only=False)
    with refuses(marker, "common.pt cannot be read as plain data", "posix.mkdir"):
        content_metadata_of(step)


def test_a_tokenizer_that_brings_code(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    marker = tmp_path / "ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (hf / "custom.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Custom: pass\n")
    config = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    with runs(marker), pytest.raises(Exception, match=""):
        AutoTokenizer.from_pretrained(str(hf), local_files_only=True, trust_remote_code=True)
    assert len(load_tokenizer(hf)) and not marker.exists()  # its plain files are used instead


def test_the_config_cannot_allow_the_code_of_a_model(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reader runs it if it is allowed to."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.transformers_utils.config import get_config

    marker = tmp_path / "ran"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (hf / "custom.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Custom: pass\n")
    config = json.loads((hf / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Custom"}}
    (hf / "config.json").write_text(json.dumps(config))
    with runs(marker), pytest.raises(Exception, match=""):
        get_config(str(hf), trust_remote_code=True)
    raw = tiny_config(tmp_path)
    checked = Config.model_validate(raw)
    default = AsyncEngineArgs.trust_remote_code
    assert engine_args(checked, cuda=False, max_model_len=64).get("trust_remote_code", default) is False
    with pytest.raises(Exception, match="trust_remote_code"):
        get_config(str(hf), trust_remote_code=False)
    assert not marker.exists()
    raw["rollout"]["engine_kwargs"] = {"trust_remote_code": True}
    (problem,) = engine_problems(Config.model_validate(raw).rollout)
    assert "rollout.engine_kwargs.trust_remote_code: reserved; always false" in problem


def test_an_index_that_names_other_files(megatron: Path, tmp_path: Path) -> None:
    step = megatron / "release"
    before = FileSystemReader(step).read_metadata()
    shard = sorted(step.glob("*.distcp"))[0]
    for name in ("../outside.distcp", str(tmp_path / "outside.distcp"), "link.distcp"):
        place = next(iter(before.storage_data))
        info = before.storage_data[place]
        changed = {**before.storage_data, place: _StorageInfo(name, info.offset, info.length)}
        (step / "link.distcp").unlink(missing_ok=True)
        (step / "link.distcp").symlink_to(shutil.copy(shard, tmp_path / "outside.distcp"))
        shutil.copy(shard, megatron / "outside.distcp")
        (step / ".metadata").write_bytes(pickle.dumps(Metadata(before.state_dict_metadata, storage_data=changed)))
        place_of: Any = before.state_dict_metadata[place.fqn]
        state = {place.fqn: torch.zeros(place_of.size, dtype=place_of.properties.dtype)}
        dcp.load(state, storage_reader=FileSystemReader(step), no_dist=True)
        assert state[place.fqn].any(), "torch's reader does not read the other file, so this test shows nothing"
        with pytest.raises(ValueError, match=r"\.metadata is refused: .*(not the name of a file|only files inside)"):
            read_index(step)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{}/outside.safetensors"])
def test_a_list_of_weights_that_names_other_files(name: str, hf: Path, tmp_path: Path) -> None:
    shutil.move(hf / "model.safetensors", tmp_path / "outside.safetensors")
    index = "model.safetensors.index.json"
    target = name.format(tmp_path)
    (hf / index).write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": target}}))
    [found], _ = get_checkpoint_shard_files(str(hf), str(hf / index))
    assert Path(found).resolve() == tmp_path / "outside.safetensors", "transformers reads the other file"
    with pytest.raises(ValueError, match="is not the name of a file inside this directory"):
        HFDirectory(hf)


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors", "notes.txt"])
def test_links_out_of_a_model(name: str, hf: Path, tmp_path: Path) -> None:
    """Side files are copied into every checkpoint: a link would carry a secret of this machine there."""
    (tmp_path / "secret").write_text("key")
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to(tmp_path / "secret")
    (tmp_path / "target").mkdir()
    shutil.copytree(hf, tmp_path / "unguarded")
    assert (tmp_path / "unguarded" / name).read_text() == "key", "a plain copy takes the secret along"
    for read in (
        lambda: load_info(hf),
        lambda: load_tokenizer(hf),
        lambda: hf_files(hf),
        lambda: HFDirectory(hf),
    ):
        with pytest.raises(ValueError, match=f"{name} is a link to .*secret, outside"):
            read()
    if not name.endswith("safetensors"):
        with pytest.raises(ValueError, match=f"{name} is a link to .*secret, outside"):
            copy_side_files(hf, tmp_path / "target", torch.float32)


def test_links_out_of_a_checkpoint(megatron: Path, tmp_path: Path) -> None:
    step = megatron / "release"
    (tmp_path / "outside").mkdir()
    shutil.move(step / "hf", tmp_path / "outside/hf")
    (step / "hf").symlink_to(tmp_path / "outside/hf")
    assert AutoConfig.from_pretrained(str(step / "hf")).model_type == "qwen3", "transformers follows the link"
    with pytest.raises(ValueError, match=r"hf is a link to .*, outside"):
        load_info(megatron)
    shutil.move(step, tmp_path / "outside/release")
    step.symlink_to(tmp_path / "outside/release")
    assert FileSystemReader(step).read_metadata().storage_data, "torch follows the link"
    with pytest.raises(ValueError, match=r"release is a link to .*, outside"):
        open_model(megatron)


def test_a_manifest_that_names_other_files(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "secret").write_text("key")
    entry = FileEntry.of(tmp_path / "secret")
    assert FileEntry.of(tmp_path / "step" / "../secret") == entry, "without a look at the name it is in order"
    (problem,) = check_files(tmp_path / "step", {"../secret": entry}, ["../secret"])
    assert "is not the name of a file inside" in problem


def test_a_model_in_the_cache_of_hugging_face(hf: Path, tmp_path: Path) -> None:
    """The files of a snapshot are links to blobs alongside it."""
    model = tmp_path / "hub/models--org--name"
    snapshot = model / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for number, file in enumerate(sorted(hf.iterdir())):
        shutil.move(file, model / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert HFDirectory(snapshot).names()
    assert load_tokenizer(snapshot).chat_template
