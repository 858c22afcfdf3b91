"""Import and export: exact, as the weight sync exports, over workers, atomic, with one message for each mistake."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.models.families import FAMILIES
from tests.support.checkpoints.converter import convert, files_of, run
from tests.support.models.tensors import differing, read_hf
from tests.support.worlds.world import World


@pytest.fixture(scope="module")
def imported(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Megatron checkpoint of a family's tiny model, converted once."""
    root, made = tmp_path_factory.mktemp("imported"), set()

    def make(family: str) -> Path:
        if family not in made:
            convert("import", "--hf", model_dir(family), "--out", root / family)
            made.add(family)
        return root / family

    return make


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "qwen3_moe" else pytest.mark.slow) for each in FAMILIES]
)
def test_round_trip_is_bit_identical(
    family: str, imported: Callable[[str], Path], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    source, megatron = model_dir(family), imported(family)
    assert len(list((megatron / "release").glob("*.distcp"))) > 3
    convert("export", "--megatron", megatron, "--hf", tmp_path / "hf")
    assert differing(source, tmp_path / "hf") == []
    out = convert("verify", source, megatron)
    (equal,) = re.findall(r"(\d+) equal, 0 differing", out)
    fused = family == "qwen3_vl_moe"  # its files hold all experts of a layer in one tensor, which count one by one
    assert int(equal) > len(read_hf(source)) if fused else int(equal) == len(read_hf(source))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.world
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3_moe", {}), ("qwen2", {"tensor": 2}), ("llama", {"tensor": 2, "sequence": True})]
)
def test_export_is_the_weight_syncs_file_for_file(
    family: str,
    sizes: dict[str, int],
    imported: Callable[[str], Path],
    model_dir: Callable[[str], Path],
    world: Callable[[int], World],
    tmp_path: Path,
) -> None:
    """Wherever one rank owns every tensor, even the files are the same: names, order, headers, index."""
    world(2).run(
        "tests.support.ranks.checkpoints.checkpoints:load_and_export",
        checkpoint=str(imported(family)),
        model_dir=str(model_dir(family)),
        out=str(tmp_path / "sync"),
        shard_bytes=100_000,
        **sizes,
    )
    convert("export", "--megatron", imported(family), "--hf", tmp_path / "ours", "--shard-gb", 1e-4)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "sync")


@pytest.mark.parametrize("workers", [1, 3])
def test_the_output_does_not_depend_on_the_workers(
    workers: int, imported: Callable[[str], Path], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    convert("import", "--hf", model_dir("qwen3"), "--out", tmp_path / "m", "--workers", workers)
    ours, theirs = files_of(tmp_path / "m"), files_of(imported("qwen3"))
    assert ours.keys() == theirs.keys()
    own = {"release/.metadata", "release/manifest.json", "release/common.pt"}  # ids that torch draws, their digests
    assert {name for name in ours if ours[name] != theirs[name]} <= own
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "hf", "--workers", workers)
    assert differing(model_dir("qwen3"), tmp_path / "hf") == []


def test_another_dtype(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("qwen3")
    convert("import", "--hf", source, "--out", tmp_path / "m", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "m/release/hf/config.json").read_text())["dtype"] == "bfloat16"
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "bf16")
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "fp32", "--dtype", "float32")
    before, half, full = read_hf(source), read_hf(tmp_path / "bf16"), read_hf(tmp_path / "fp32")
    assert all(torch.equal(before[name].bfloat16(), half[name]) for name in before | half)
    assert all(torch.equal(half[name].float(), full[name]) for name in half | full)
    code, out, _ = run("verify", source, tmp_path / "m")
    assert code == 1 and f"{len(before)} of another shape or dtype" in out


def test_transformers_loads_the_export(imported: Callable[[str], Path], tmp_path: Path) -> None:
    convert("export", "--megatron", imported("qwen2"), "--hf", tmp_path / "hf", "--shard-gb", 1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.tie_word_embeddings and model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


def test_dry_run_writes_nothing(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    out = convert("import", "--hf", model_dir("qwen3"), "--out", tmp_path / "m", "--dry-run")
    assert "needed" in out and "free" in out and "nothing was written" in out
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept_without_force(
    imported: Callable[[str], Path], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / "precious").write_text("")
    code, _, err = run("export", "--megatron", imported("qwen3"), "--hf", out)
    assert code == 1 and "exists already" in err and [p.name for p in out.iterdir()] == ["precious"]
    convert("export", "--megatron", imported("qwen3"), "--hf", out, "--force")
    assert differing(model_dir("qwen3"), out) == [] and not (out / "precious").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_verify_says_what_differs(
    model_dir: Callable[[str], Path], imported: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir("qwen3"), other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.self_attn.q_norm.weight"][3] += 0.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    code, out, _ = run("verify", imported("qwen3"), other)
    assert code == 1 and "1 differing" in out and "model.layers.1.self_attn.q_norm.weight  5.000e-01" in out
    code, out, _ = run("verify", model_dir("qwen3"), model_dir("llama"))
    assert code == 1 and "8 missing" in out and "model.layers.0.self_attn.q_norm.weight" in out


def test_inspect(model_dir: Callable[[str], Path], imported: Callable[[str], Path]) -> None:
    for directory in (model_dir("qwen3_moe"), imported("qwen3_moe")):
        out = convert("inspect", directory)
        assert "qwen3_moe (Qwen3MoeForCausalLM)" in out and "4, 3 of them with 4 experts" in out
        assert f"{sum(t.numel() for t in read_hf(model_dir('qwen3_moe')).values()):,}" in out
    assert "none of an optimizer" in out, "an import has none"


@pytest.mark.parametrize("name", ["shard", "hf/tokenizer.json"])
def test_a_flipped_byte_is_found(name: str, imported: Callable[[str], Path], tmp_path: Path) -> None:
    """`verify` always finds it, and `export` finds it on demand; both name the file."""
    shutil.copytree(imported("qwen3"), tmp_path / "m")
    step = tmp_path / "m/release"
    assert convert("verify", step, imported("qwen3")).count("files match its manifest") == 2
    export = ("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "hf")
    convert(*export, "--check-digests")
    file = sorted(step.glob("*.distcp"))[1] if name == "shard" else step / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for command in (("verify", imported("qwen3"), tmp_path / "m"), (*export, "--force", "--check-digests")):
        code, _, err = run(*command)
        assert code == 1 and err.startswith("convert.py: the checkpoint is damaged:") and f"{file}: digest" in err
    convert(*export, "--force")


def test_a_checkpoint_without_a_manifest(imported: Callable[[str], Path], tmp_path: Path) -> None:
    """Megatron-LM writes none. There is nothing to check then, and a user who asks for the check learns it."""
    shutil.copytree(imported("qwen3"), tmp_path / "m")
    (tmp_path / "m/release/manifest.json").unlink()
    assert convert("verify", tmp_path / "m", imported("qwen3")).count("files match its manifest") == 1
    code, _, err = run("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "hf", "--check-digests")
    assert code == 1 and "has no manifest.json" in err


def test_a_shard_that_the_manifest_does_not_know(imported: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(imported("qwen3"), tmp_path / "m")
    path = tmp_path / "m/release/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["__1_0.distcp"]
    path.write_text(json.dumps(manifest))
    code, _, err = run("verify", tmp_path / "m", imported("qwen3"))
    assert code == 1 and f"{path} has no entry for __1_0.distcp" in err
