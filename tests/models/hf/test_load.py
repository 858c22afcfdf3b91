"""The loader stops and lists what is wrong before it writes anything, and reads only its own slices."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.hf.directory import check_tensors
from megarl.models.hf.read_config import load_info
from megarl.models.hf.safetensors import SafetensorsWriter, TensorHeader, read_records, write_index
from megarl.models.megatron.shards import table
from tests.support.worlds.world import World


@pytest.fixture
def copy(model_dir: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a family's directory whose tensors went through `change`."""

    def make(family: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        target = tmp_path / family
        shutil.copytree(model_dir(family), target)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target

    return make


def problems(directory: Path) -> str:
    """Return what the loader finds wrong with the files; empty if they load."""
    info = load_info(directory)
    try:
        check_tensors(directory, read_records(directory), table(info), info)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "moonlight"]
)
def test_the_table_is_the_files(family: str, model_dir: Callable[[str], Path]) -> None:
    info = load_info(model_dir(family))
    records = read_records(model_dir(family))
    check_tensors(model_dir(family), records, table(info), info)
    names = [name for entry in table(info).values() for name in entry.names]
    assert len(names) == len(set(names)) == len(records)


def test_everything_wrong_is_listed_at_once(copy: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.2.self_attn.o_proj.weight"] = tensors["model.layers.2.self_attn.o_proj.weight"][:, :32]
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.uint8)

    directory = copy("qwen3", lambda tensors: (change(tensors), tensors.update(_contiguous(tensors)))[0])
    message = problems(directory)
    assert "1 missing tensors" in message and "model.layers.1.mlp.up_proj.weight" in message
    assert "1 tensors that the family does not have" in message
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.2.self_attn.o_proj.weight in" in message and "model.safetensors: shape [64, 32]" in message
    assert "dtype U8" in message


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_a_qwen2_without_its_biases_does_not_load(copy: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.bias")]:
            del tensors[name]

    assert "12 missing tensors" in problems(copy("qwen2", change))


def test_recomputed_buffers_of_old_files_are_tolerated(copy: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory = copy("llama", lambda tensors: tensors.update({name: torch.ones(16)}))
    assert name in read_records(directory)
    assert problems(directory) == ""


def test_untied_files_under_a_tied_config_and_the_reverse(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3", lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in problems(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert problems(directory) == ""


@pytest.mark.parametrize(("offset", "loads"), [(0.0, True), (1.0, False)])
@pytest.mark.world
def test_a_repeated_lm_head_must_be_the_embedding(
    offset: float, loads: bool, copy: Callable[..., Path], world: Callable[[int], World]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + offset

    directory = str(copy("qwen2", change))
    if loads:
        results = world(2).run("tests.support.ranks.models.models:bytes_read", model_dir=directory, tensor=2)
        assert all(own > replicated > 0 for own, replicated in results)
    else:
        with pytest.raises(AssertionError, match=r"lm_head\.weight differs"):
            world(2).run("tests.support.ranks.models.models:bytes_read", model_dir=directory, tensor=2)


@pytest.mark.world
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3", {"tensor": 2}), ("qwen3", {"pipeline": 2}), ("qwen3_moe", {"expert": 2})]
)
def test_each_rank_reads_its_slices_only(
    family: str, sizes: dict[str, Any], world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    """Together the ranks read every sharded byte once and every replicated byte once each."""
    results = world(2).run("tests.support.ranks.models.models:bytes_read", model_dir=str(model_dir(family)), **sizes)
    total = sum(tensor.nbytes for tensor in load_file(model_dir(family) / "model.safetensors").values())
    assert sum(own for own, _ in results) == total + sum(replicated for _, replicated in results) // 2
    assert all(own < 0.9 * total for own, _ in results)


@pytest.mark.world
def test_a_parameter_without_a_rule_stops_the_load(
    world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(AssertionError, match=r"mapping does not cover[\s\S]*q_layernorm\.weight: no rule of family"):
        world(2).run("tests.support.ranks.models.models:load_without_qk_norm_rules", model_dir=str(model_dir("qwen3")))


@pytest.mark.world
@pytest.mark.parametrize(
    ("what", "said"), [("no rule", "no rule of family deepseek_v3"), ("no buffer", "the model does not have it")]
)
def test_a_buffer_without_a_rule_and_the_reverse_stop_the_load(
    what: str, said: str, world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    with pytest.raises(AssertionError, match=rf"layers\.1\.mlp\.router\.expert_bias: {said}"):
        world(2).run(
            "tests.support.ranks.models.models:load_with_wrong_buffers",
            model_dir=str(model_dir("deepseek_v3")),
            what=what,
        )


def test_truncated_file(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3", lambda tensors: None)
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        read_records(directory)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"a.safetensors": True}, r"holds model\.safetensors and model\.safetensors\.index\.json.*stale"),
        ({"a.safetensors": False}, r"holds model\.safetensors and model\.safetensors\.index\.json.*stale"),
        ({"consolidated.safetensors": None}, r"other weights, .*: remove consolidated\.safetensors"),
        (
            {"adapter_model.safetensors": None, "b.safetensors": None},
            r"remove adapter_model\.safetensors, b\.safetensors",
        ),
    ],
)
def test_other_weights_next_to_a_model_in_one_file_are_refused(
    others: dict[str, bool | None], said: str, tmp_path: Path
) -> None:
    """transformers reads model.safetensors, vLLM the files of the index, or all. True: indexed and there."""
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    for name, there in others.items():
        if there is not None:
            write_index(tmp_path, [(name, [TensorHeader("x", (2,), torch.float32)])])
        if there is not False:
            save_file({"x": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=said):
        read_records(tmp_path)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        parts = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(3), "z": torch.ones(1)}}
        for file, tensors in parts.items():
            save_file(tensors, tmp_path / file)
        write_index(
            tmp_path,
            [(f, [TensorHeader(n, tuple(t.shape), t.dtype) for n, t in p.items()]) for f, p in parts.items()],
        )
        return tmp_path

    def test_reads_over_files(self, sharded: Path) -> None:
        assert {name: record.shape for name, record in read_records(sharded).items()} == {
            "x": (2,),
            "y": (3,),
            "z": (1,),
        }

    def test_missing_file(self, sharded: Path) -> None:
        (sharded / "b.safetensors").unlink()
        with pytest.raises(ValueError, match=r"names files that do not exist: .*b\.safetensors"):
            read_records(sharded)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda index: index.pop("z"), "has no entry for z"),
            (lambda index: index.update(x="b.safetensors"), r"says x is in b\.safetensors|has no entry"),
            (lambda index: index.update(w="a.safetensors"), r"says w is in a\.safetensors"),
        ],
    )
    def test_disagreement(self, sharded: Path, change: Any, message: str) -> None:
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            read_records(sharded)


class TestWriter:
    SPECS = (TensorHeader("a", (2, 3), torch.float32), TensorHeader("b", (5,), torch.bfloat16))

    def test_what_it_writes_is_what_safetensors_reads(self, tmp_path: Path) -> None:
        values = {"a": torch.randn(3, 2).t(), "b": torch.randn(5).bfloat16()}
        writer = SafetensorsWriter(tmp_path / "x.safetensors", self.SPECS)
        for name, value in values.items():
            writer.write(name, value)
        writer.close()
        read = load_file(tmp_path / "x.safetensors")
        assert set(read) == set(values)
        assert all(torch.equal(read[name], values[name]) for name in values)

    def test_order_and_completeness(self, tmp_path: Path) -> None:
        writer = SafetensorsWriter(tmp_path / "x.safetensors", self.SPECS)
        writer.write("a", torch.zeros(2, 3))
        with pytest.raises(ValueError, match="expected"):
            writer.write("b", torch.zeros(5))
        writer = SafetensorsWriter(tmp_path / "y.safetensors", self.SPECS)
        with pytest.raises(ValueError, match="2 tensors were not written"):
            writer.close()
