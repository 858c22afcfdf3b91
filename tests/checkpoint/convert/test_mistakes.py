"""Whatever is wrong with the files or the disk: one message that names it, a non-zero exit status, nothing written."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import hf_to_megatron as importing
from megarl.checkpoint.convert import megatron_to_hf as exporting
from megarl.checkpoint.convert.cli import main
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from tests.support.checkpoints import kill_points
from tests.support.checkpoints.converter import convert, refused, run
from tests.support.models.tensors import differing

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(model_dir("qwen3"), tmp_path / "hf")
    return tmp_path / "hf"


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors", {"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


def truncate(path: Path, by: int = 100) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - by)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(Q), ["1 missing tensors", Q]),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}), ["1 tensors that the family", "extra"]),
        (lambda t: t.update({Q: t[Q][:-1]}), [Q, "shape [127, 64], config.json implies [128, 64]"]),
        (lambda t: t.update({Q: t[Q].to(torch.int32)}), [Q, "model.safetensors", "I32 is not a supported"]),
        (lambda t: t.update({Q: t[Q].half()}), [Q, "several dtypes", "model.safetensors is torch.float16", "--dtype"]),
    ],
    ids=["missing", "unexpected", "misshapen", "integer", "mixed-dtypes"],
)
def test_a_wrong_tensor(
    edit: Callable[[dict[str, torch.Tensor]], None], words: list[str], source: Path, tmp_path: Path
) -> None:
    change(source, edit)
    err = refused("import", "--hf", source, "--out", tmp_path / "m")
    assert all(word in err for word in words), err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_mixed_dtypes_convert_to_one(source: Path, tmp_path: Path) -> None:
    change(source, lambda t: t.update({Q: t[Q].half()}))
    convert("import", "--hf", source, "--out", tmp_path / "m", "--dtype", "bfloat16")
    stored = MegatronDirectory(tmp_path / "m")
    assert {stored.dtype(name) for name in stored.names()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "7",
        '{"architectures": 7}',
        {"num_attention_heads": None},
        {"hidden_size": [1]},
        {"rope_parameters": [1]},
        {"num_attention_heads": 0, "head_dim": None},
        {"rms_norm_eps": {}},
    ],
    ids=str,
)
def test_a_config_of_another_kind(content: str | dict[str, Any], source: Path, tmp_path: Path) -> None:
    if isinstance(content, str):
        (source / "config.json").write_text(content)
    else:
        change_config(source, **content)
    for command in (["import", "--hf", source, "--out", tmp_path / "m"], ["inspect", source]):
        assert str(source / "config.json") in refused(*command)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_of_another_kind(content: str, source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors.index.json"
    path.write_text(content)
    err = refused("import", "--hf", source, "--out", tmp_path / "m")
    assert f"{path} is not an index of weight files" in err


@pytest.mark.parametrize("value", ["auto", "torch.float32", None, "nonsense"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_need_not_know_its_dtype(key: str, value: str | None, source: Path, tmp_path: Path) -> None:
    """The converted config gets the dtype of the weights, whatever the old one said."""
    change(source, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype", None), config.pop("torch_dtype", None)
    (source / "config.json").write_text(json.dumps(config if value is None else config | {key: value}))
    convert("import", "--hf", source, "--out", tmp_path / "m")
    written = json.loads((tmp_path / "m/release/hf/config.json").read_text())
    assert written["dtype" if value is None else key] == "bfloat16"
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == written
    assert differing(source, tmp_path / "back") == []


def test_a_tie_that_is_none(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(model_dir("qwen2"), source)
    change(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert "lm_head.weight differs" in refused("import", "--hf", source, "--out", tmp_path / "m")


def test_damaged_megatron_checkpoints(source: Path, tmp_path: Path) -> None:
    """Each damage is undone before the next."""
    convert("import", "--hf", source, "--out", tmp_path / "m")
    step, out = tmp_path / "m/release", tmp_path / "out"
    export = ("export", "--megatron", tmp_path / "m", "--hf", out)
    shard = sorted(step.glob("*.distcp"))[1]
    whole = shard.read_bytes()

    truncate(shard)
    err = refused(*export)
    assert str(shard) in err and "is truncated" in err
    shard.unlink()
    assert f"{shard} does not exist" in refused(*export)
    shard.write_bytes(whole[:200] + bytes(len(whole) - 200))
    err = refused(*export)
    assert str(shard) in err and "is damaged" in err
    shutil.rmtree(tmp_path / ".out.converting")
    shard.write_bytes(whole)

    (step / ".metadata").rename(step / "aside")
    assert "not a complete checkpoint: .metadata missing" in refused(*export)
    (step / ".metadata").write_bytes(b"nonsense")
    assert "not a readable index" in refused(*export)
    (step / "aside").rename(step / ".metadata")

    (step / "hf").rename(step / "aside")
    assert "copy config.json" in refused(*export)
    (step / "aside").rename(step / "hf")

    change_config(step / "hf", num_hidden_layers=5)
    err = refused(*export)
    assert "missing keys" in err and "decoder.layers.4.mlp.linear_fc1.weight_w" in err
    change_config(step / "hf", num_hidden_layers=4)

    (tmp_path / "m/latest_checkpointed_iteration.txt").write_text("7")
    assert "iter_0000007 does not exist" in refused(*export)
    assert not out.exists()


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, words in (("nowhere", "does not exist"), ("file", "is not a directory"), ("", "it has no config.json")):
        err = refused("import", "--hf", tmp_path / name, "--out", tmp_path.parent / "m")
        assert f"--hf {tmp_path / name} " in err and words in err and "model.path" not in err
    assert "neither a tracker file nor shards" in refused(
        "export", "--megatron", tmp_path, "--hf", tmp_path.parent / "m"
    )
    assert "neither a Hugging Face directory" in refused("inspect", tmp_path)


def test_a_megatron_checkpoint_is_not_imported(source: Path, tmp_path: Path) -> None:
    convert("import", "--hf", source, "--out", tmp_path / "m")
    for path in (tmp_path / "m", tmp_path / "m/release"):
        err = refused("import", "--hf", path, "--out", tmp_path / "again")
        assert f"--hf {path} is a Megatron checkpoint already" in err


def test_binary_files_where_text_is_read(source: Path, tmp_path: Path) -> None:
    """The error names each file. Unpickling random bytes may raise any exception."""
    convert("import", "--hf", source, "--out", tmp_path / "m")
    index, tracker = tmp_path / "m/release/.metadata", tmp_path / "m/latest_checkpointed_iteration.txt"
    whole, draw = index.read_bytes(), random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(8):
            damaged[draw.randrange(200)] = draw.randrange(256)
        index.write_bytes(bytes(damaged))
        code, _, err = run("inspect", tmp_path / "m")
        assert code == 0 or str(index) in err or str(index.parent) in err, err
    index.write_bytes(b"\x80\x04\x8c\x02\xff\xff.")
    assert f"{index} is not a readable index" in refused("inspect", tmp_path / "m")
    for content in (b"\xff\xfe\x00", "²".encode()):
        tracker.write_bytes(content)
        assert f"{tracker} must hold a number" in refused("inspect", tmp_path / "m")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["export", "--shard-gb", value], "is not a size in GB above 0") for value in ("0", "-1", "nan", "inf", "x")),
        *((["import", "--workers", value], "is not a positive whole number") for value in ("0", "-1", "x", "1.5")),
        (["import", "--resume", "--force"], "--force: not allowed with argument --resume"),
        (["export", "--resume", "--force"], "--force: not allowed with argument --resume"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["--out", "b", "--hf", "a"] if arguments[0] == "import" else ["--megatron", "a", "--hf", "b"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, *paths])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_an_interrupt_speaks_of_resume_only_where_there_is_one(source: Path, tmp_path: Path) -> None:
    with mock.patch("megarl.checkpoint.convert.job.run_units", side_effect=KeyboardInterrupt):
        code, _, err = run("import", "--hf", source, "--out", tmp_path / "m")
    assert (code, err) == (130, "convert.py: interrupted; continue with --resume\n")
    with mock.patch("megarl.checkpoint.convert.cli.compare", side_effect=KeyboardInterrupt):
        code, _, err = run("verify", source, source)
    assert (code, err) == (130, "convert.py: interrupted\n")


def test_a_disk_that_is_too_small_is_seen_first(source: Path, tmp_path: Path) -> None:
    with mock.patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)):
        err = refused("import", "--hf", source, "--out", tmp_path / "m")
    assert "needs 67" in err and "1.00 kB free" in err and [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["import", "export"])
def test_a_file_on_a_full_disk_is_named(kind: str, workers: int, source: Path, tmp_path: Path) -> None:
    """/dev/full is a full disk to the kernel; the message names the file on it and the tensor."""
    out, files = tmp_path / "out", tmp_path / ".out.converting/output"
    command: list[Any] = ["import", "--hf", source, "--out", out, "--workers", workers]
    full = files / "release/__2_0.distcp"
    if kind == "export":
        convert("import", "--hf", source, "--out", tmp_path / "m")
        command = ["export", "--megatron", tmp_path / "m", "--hf", out, "--workers", workers]
        full = files / "model.safetensors"
    job = importing.HFToMegatron if kind == "import" else exporting.MegatronToHF
    prepare = job.prepare

    def prepare_with(self: Any, partial: Path) -> None:
        prepare(self, partial)
        full.unlink(missing_ok=True)
        full.symlink_to("/dev/full")

    with mock.patch.object(job, "prepare", prepare_with):
        err = refused(*command)
    assert f"the disk is full (writing {full}, at " in err and "continue with --resume" in err
    assert ("at decoder.layers." if kind == "import" else "at model.") in err and ".weight" in err
    assert not out.exists()
    full.unlink()
    assert "of it before the resume" in convert(*command, "--resume") or kind == "export"
    assert run("verify", source, out)[0] == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("import", "release/.metadata.tmp"),
        ("import", "release/hf/tokenizer.json"),
        ("export", "tokenizer.json"),
        ("export", "model.safetensors.index.json"),
    ],
)
def test_a_small_file_on_a_full_disk_is_named(kind: str, name: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command: list[Any] = ["import", "--hf", source, "--out", out]
    if kind == "export":
        convert("import", "--hf", source, "--out", tmp_path / "m")
        command = ["export", "--megatron", tmp_path / "m", "--hf", out, "--shard-gb", 2e-4]
    full = tmp_path / ".out.converting/output" / name
    place = full.parent if name.endswith("tokenizer.json") else str(full).removesuffix(".tmp")
    mkdir = Path.mkdir

    def reached(point: str) -> None:
        if point == "metadata" and "hf/" not in name:
            full.symlink_to("/dev/full")

    def mkdir_with(self: Path, *arguments: Any, **options: Any) -> None:
        mkdir(self, *arguments, **options)
        if self == full.parent and "hf/" in name and not full.is_symlink():
            full.symlink_to("/dev/full")

    with (
        mock.patch.object(kill_points, "reached", reached),
        mock.patch.object(Path, "mkdir", mkdir_with),
        kill_points.kill_points(),
    ):
        err = refused(*command)
    assert "the disk is full" in err and f"(writing {place}" in err and "--resume" in err
    assert not out.exists()
    full.unlink()
    convert(*command, "--resume")
    assert run("verify", source, out)[0] == 0


def test_a_target_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    err = refused("import", "--hf", source, "--out", tmp_path / "file/m")
    assert err == f"convert.py: {tmp_path}/file/m cannot be created: {tmp_path}/file is not a directory\n"
    assert refused("import", "--hf", source, "--out", tmp_path / "file/m", "--dry-run") == err
    # root may write anywhere, whatever the mode says
    with mock.patch("os.access", lambda path, mode: path != tmp_path):
        for options in ([], ["--dry-run"]):
            err = refused("import", "--hf", source, "--out", tmp_path / "sub/m", *options)
            assert err == f"convert.py: {tmp_path}/sub/m cannot be created: {tmp_path} is not writable\n"


def test_resume_of_something_else(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    assert "nothing to resume" in refused("import", "--hf", source, "--out", out, "--resume")
    with mock.patch.object(importing.HFToMegatron, "finish", side_effect=OSError(errno.EIO, "I/O error")):
        assert "I/O error" in refused("import", "--hf", source, "--out", out)
    assert not out.exists()
    assert "holds an unfinished conversion" in refused("import", "--hf", source, "--out", out)
    assert "other options" in refused("import", "--hf", source, "--out", out, "--resume", "--dtype", "bfloat16")
    os.utime(source / "model.safetensors", (0, 0))
    assert "begun from other files" in refused("import", "--hf", source, "--out", out, "--resume")
    convert("import", "--hf", source, "--out", out, "--force")
