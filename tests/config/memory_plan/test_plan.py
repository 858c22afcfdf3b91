import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.common.errors import ConfigError, Findings
from megarl.common.values import GIB
from megarl.config.memory_plan.parameters import chunk_parameters, in_flight_chunks, model_parameters
from megarl.config.memory_plan.plan import RunPlan, make_plan
from megarl.config.memory_plan.plan_tables import print_dry_run
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.read_config import info_from_config
from megarl.models.megatron.layout import Layout
from tests.support.trainer.configs import config, tree

# Shapes of published models (their config.json), for plans without a download.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
}  # fmt: skip
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def published(tmp_path: Path) -> Any:
    def write(shape: dict[str, Any]) -> Path:
        directory = tmp_path / shape["architectures"][0]
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(shape))
        return directory

    return write


def plan(model: Path, **changes: Any) -> RunPlan:
    device = changes.pop("device", "cuda")
    return make_plan(config(model, **changes), device=device, files=False)


def big(published: Any, shape: dict[str, Any], **changes: Any) -> RunPlan:
    base: dict[str, Any] = {
        "trainer": {"gpus": 32, "gpus_per_node": 8, "device_memory_gib": 80, "micro_batch_tokens": 10240,
                    "parallel": {"tensor": 2, "sequence": True, "expert": 8, "expert_tensor": 1}},
        "rollout": {"replicas": 24, "tensor_parallel": 4, "gpus_per_node": 8, "device_memory_gib": 80},
        "batch": {"groups": 128, "samples_per_group": 16},
        "sampling": {"max_tokens": 8192},
        "data": {"path": "d.jsonl", "max_prompt_tokens": 2048},
        "megatron": {"transformer": {"recompute_granularity": "full", "recompute_method": "uniform",
                                     "recompute_num_layers": 1}},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        base[section] = {**base.get(section, {}), leaf: value}
    return plan(published(shape), **base)


def printed(found: RunPlan) -> str:
    stream = StringIO()
    print_dry_run(found, found.config, stream, Findings())
    return stream.getvalue()


@pytest.mark.parametrize(
    ("precision", "device", "noted"), [("fp32", "cuda", 1), ("bf16", "cuda", 0), ("fp32", "cpu", 0)]
)
def test_fp32_of_transformer_engine_is_tf32(models: dict[str, Path], precision: str, device: str, noted: int) -> None:
    found = plan(models["qwen3"], device=device, trainer__precision=precision)
    assert sum("TF32" in note for note in found.notes) == noted


def test_published_sizes() -> None:
    total, active = model_parameters(info_from_config(QWEN3_30B_A3B))
    assert total == 30_532_122_624  # as on the model card: 30.5 B, 3.3 B active
    assert active == pytest.approx(3.35e9, rel=0.01)
    assert model_parameters(info_from_config(QWEN25_7B))[0] == 7_615_616_512


def test_the_plan_of_the_96_to_32_recipe(published: Any) -> None:
    found = big(published, QWEN3_30B_A3B)
    assert (found.ranks, found.layout.data, found.layout.expert_data) == (32, 16, 4)
    assert (found.replicas, found.engine_gpus, found.pools.rollout.nodes) == (24, 4, 12)
    assert (found.samples_per_step, found.max_sequence_tokens) == (2048, 10240)
    memory = found.trainer
    # 1.5 B dense + 29 B / 8 expert parameters per rank: bf16 weights, fp32 gradients, sharded optimizer.
    assert memory.term("weights").bytes == pytest.approx(2 * 4.4e9, rel=0.05)
    assert memory.term("gradients").bytes == 2 * memory.term("weights").bytes
    assert memory.term("optimizer").bytes < memory.term("gradients").bytes
    assert memory.peak < 80 * GIB
    assert found.engine.kv_tokens is not None and found.engine.kv_tokens > 20 * 10240
    reported = printed(found)
    (pinned,) = re.findall(r"host memory +up to ([\d.]+) GiB pinned per rank, ([\d.]+) GiB per trainer node", reported)
    assert 10 < float(pinned[0]) < 16 and float(pinned[1]) == pytest.approx(8 * float(pinned[0]), abs=0.1)
    assert "experts of a step" not in reported
    replayed = " ".join(printed(big(published, QWEN3_30B_A3B, trainer__router_replay="r3")).split())
    assert "the experts of a step, up to 0.47 GiB per rank" in replayed  # 2048 / 16 rows of 10,240 tokens of 48 x 8


def test_the_plan_tells_how_engines_take_weights_and_by_what_experts_are_computed(models: dict[str, Path]) -> None:
    """Each engine's own choice is in the run's log (`leader.py`)."""
    moe, dense = models["qwen3_moe"], models["qwen3"]
    by = {backend: printed(plan(moe, rollout__engine_kwargs={"moe_backend": backend}))
          for backend in ("triton", "flashinfer_cutlass")}  # fmt: skip
    assert "in place, with experts by triton" in by["triton"]
    assert "layer by layer, with experts by flashinfer_cutlass" in by["flashinfer_cutlass"]
    assert "experts by Triton, vLLM's choice on Hopper" in printed(plan(moe))
    assert re.search(r"weights load +in place *\n", printed(plan(dense)))
    assert "packed copies" in printed(plan(moe, device="cpu"))


def test_what_does_not_fit_is_refused_by_its_largest_term(published: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer: .* phase 'update'.* largest term is activations .*micro_batch_tokens"
    ):
        big(published, QWEN3_30B_A3B, megatron__transformer={"recompute_granularity": None},
            trainer__micro_batch_tokens=40960)  # fmt: skip
    with pytest.raises(ConfigError, match="largest term is gradients"):
        big(published, QWEN25_7B, trainer__parallel={}, trainer__device_memory_gib=40)
    with pytest.raises(ConfigError, match=r"rollout: .*largest term is weights .*tensor_parallel"):
        big(published, QWEN3_30B_A3B, rollout__tensor_parallel=1, rollout__device_memory_gib=64)
    with pytest.raises(ConfigError, match="the KV cache of"):
        big(published, QWEN25_7B, trainer__parallel={}, rollout__tensor_parallel=1, rollout__device_memory_gib=23.5)


def test_recompute_and_offload_show(published: Any) -> None:
    whole = big(published, QWEN25_7B, trainer__parallel={}, megatron__transformer={}, trainer__device_memory_gib=400)
    light = big(published, QWEN25_7B, trainer__parallel={})
    assert light.trainer.term("activations").bytes < whole.trainer.term("activations").bytes / 5
    assert light.trainer.term("recompute").bytes > 0


def test_a_sync_needs_memory_alongside_the_share_of_the_engine(published: Any) -> None:
    """vLLM fills its share with its cache, and its reload holds whole expert tensors: 1.4 GiB of a 30B model."""
    found = big(published, QWEN3_30B_A3B).engine.memory
    layer = 128 * 3 * 768 * 2048 * 2
    assert (found.term("reload").bytes, found.term("reload").when) == (layer + layer // 4, "sync")
    assert found.total("generate") == pytest.approx(0.85 * 80 * GIB, rel=1e-6)
    alongside = found.term("forward").bytes + found.term("logits").bytes
    assert (
        found.total("sync") == found.total("generate") - alongside + found.term("sync buckets").bytes + layer * 5 // 4
    )
    with pytest.raises(ConfigError, match=r"rollout: .*in phase 'sync'.*lower rollout\.gpu_memory_utilization"):
        big(published, QWEN3_30B_A3B, rollout__gpu_memory_utilization=0.99)


def test_the_buffers_of_buckets_are_counted_in_every_phase(published: Any) -> None:
    """The trainer keeps its buffers between syncs, two of them for its own buckets."""
    tree = {"trainer__parallel": {"tensor": 4}, "weight_sync__bucket_mb": 512}
    term = big(published, QWEN25_7B, **tree).trainer.term("sync buckets")
    assert (term.when, term.bytes) == ("always", 5 * GIB // 2)
    with pytest.raises(ConfigError, match=r"largest term is sync buckets .*: lower weight_sync\.bucket_mb"):
        big(published, QWEN25_7B, **tree | {"trainer__device_memory_gib": 40, "weight_sync__bucket_mb": 5000})


def test_experts_are_not_planned_to_be_evenly_loaded(published: Any) -> None:
    uneven = big(
        published, QWEN3_30B_A3B, trainer__recompute="none", megatron__transformer={}, trainer__device_memory_gib=200
    )
    activations, more = uneven.trainer.term("activations").bytes, uneven.trainer.term("uneven experts").bytes
    assert 0.05 * activations < more < 0.25 * activations  # a quarter of the routed rows, which are a part of all
    assert "uneven experts" not in [term.name for term in big(published, QWEN25_7B, trainer__parallel={}).trainer.terms]


@pytest.mark.parametrize(("placement", "when"), [("gpu", "always"), ("cpu_offload", "log-probs")])
def test_reference_weights(models: dict[str, Path], placement: str, when: str) -> None:
    found = plan(models["qwen3"], algorithm__kl={"coef": 0.1}, reference__placement=placement)
    assert found.trainer.term("reference weights").when == when
    assert "reference weights" not in [term.name for term in plan(models["qwen3"]).trainer.terms]


def test_samples_per_update(models: dict[str, Path]) -> None:
    found = plan(models["qwen3"], trainer__mini_batches=3)
    assert (found.samples_per_step, found.samples_per_update) == (16, 8)  # 4 groups in 3 updates: at most 2 groups


def test_unknown_lengths_are_noted(models: dict[str, Path]) -> None:
    found = plan(models["qwen3"], data={"path": "d.jsonl"}, device="cpu")
    assert found.max_sequence_tokens == 512
    assert any("data.max_prompt_tokens is not set" in note for note in found.notes)


def test_in_flight_micro_batches() -> None:
    assert [in_flight_chunks(Layout(pipeline=4, world_size=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    interleaved = Layout(pipeline=2, virtual_pipeline=2, world_size=2)
    assert [in_flight_chunks(interleaved, stage) for stage in range(2)] == [5, 3]


@settings(deadline=None)
@given(
    pipeline=st.sampled_from([1, 2, 4]),
    virtual=st.sampled_from([None, 2]),
    expert=st.sampled_from([1, 2, 8]),
    tied=st.booleans(),
    moe=st.booleans(),
)
def test_ranks_together_hold_the_model_once(
    pipeline: int, virtual: int | None, expert: int, tied: bool, moe: bool
) -> None:
    """Every layer is on exactly one chunk, and the shards of all ranks add up to the model."""
    shape = {**QWEN3_30B_A3B, "num_hidden_layers": 16, "tie_word_embeddings": tied}
    if not moe:
        shape |= {"architectures": ["Qwen3ForCausalLM"]}
        expert = 1
    info: ModelInfo = info_from_config(shape)
    virtual = virtual if pipeline > 1 else None
    layout = Layout(pipeline=pipeline, virtual_pipeline=virtual, expert=expert, world_size=pipeline * expert)
    chunks = [(stage, chunk) for stage in range(pipeline) for chunk in range(virtual or 1)]
    assert sorted(layer for each in chunks for layer in layout.chunk_layers(16, *each)) == list(range(16))
    held = 0
    for each in chunks:
        shared, experts = chunk_parameters(info, layout, *each)
        held += shared + expert * experts
    total = model_parameters(info)[0]
    assert held == total + (info.vocab_size * info.hidden if tied and pipeline > 1 else 0)


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        ({"pipeline": 2}, "PP 2 · DP 1"),
        ({"pipeline": 2, "last_stage_layers": 1}, "PP 2 (3 + 1 layers) · DP 1"),
        ({"pipeline": 2, "first_stage_layers": 1}, "PP 2 (1 + 3 layers) · DP 1"),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t|t|tL"},
            "PP 2 · DP 1 · VPP 2",
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Ettt|t||L"},
            "PP 2 (3 + 1 layers) · DP 1 · VPP 2",
        ),
    ],
)
def test_the_plan_shows_unequal_stages(models: dict[str, Path], parallel: dict[str, Any], line: str) -> None:
    chosen = config(models["qwen3"], trainer__gpus=2, trainer__parallel=parallel)
    assert line in " ".join(printed(make_plan(chosen, device="cuda", files=False)).split())


def test_the_plan_is_of_the_fullest_stage(models: dict[str, Path]) -> None:
    """The more layers one stage has, the more memory the plan says; that of a stage without layers is planned too."""
    texts = ["Ett|ttL", "Ettt|tL", "Etttt|L"]
    peaks = []
    for text in texts:
        parallel = {"pipeline": 2, "pipeline_layout": text}
        found = plan(models["qwen3"], device="cuda", trainer__gpus=2, trainer__parallel=parallel, trainer__recompute=1)
        peaks.append(found.trainer.peak)
    assert peaks[0] < peaks[1] < peaks[2]


def test_dry_run_prints_config_and_plan(models: dict[str, Path]) -> None:
    chosen = config(models["qwen3_moe"], trainer__gpus=2, trainer__parallel={"expert": 2}, algorithm__kl={"coef": 0.1})
    text = printed(make_plan(chosen, device="cuda", files=False))
    for expected in ("micro_batch_tokens: 256", "TP 1 · PP 1 · DP 2 · EP 2", "4 groups, 16 samples", "2 GPUs: 0,1",
                     "reference weights", "optimizer", "sync buckets", "GPU memory is unknown"):  # fmt: skip
        assert expected in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trainer__device_memory_gib": 80}, ["up to 256 tokens; 65536 would fit with a tenth of the memory free"]),
        ({"trainer__device_memory_gib": 80, "trainer__micro_batch_tokens": "auto"}, ["up to 65536 tokens\n"]),
        (
            {"trainer__gpus": 4, "trainer__parallel": {"context": 2}},
            ["TP 1 · PP 1 · DP 2 · CP 2", "up to 256 tokens, 128 on each of 2 context-parallel ranks"],
        ),
        ({"trainer__recompute": 1}, ["the first 1 layer of each stage"]),
        ({"megatron__transformer": {"recompute_granularity": "selective"}}, ["as set in megatron.transformer"]),
    ],
)
def test_the_plan_shows_what_auto_chose_and_what_would_fit(
    models: dict[str, Path], changes: dict[str, Any], expected: list[str]
) -> None:
    stream = StringIO()
    chosen = config(models["qwen3"], **changes)
    print_dry_run(make_plan(chosen, device="cuda", files=False), chosen, stream, Findings())
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    assert all(each in text for each in expected), text


@pytest.mark.parametrize(
    ("changes", "deadline"),
    [
        (
            {},
            "none; a response that takes 1800 s (timeouts.generate_s) fails its group, or ends the run if the trainer "
            "has waited for it from its start",
        ),
        (
            {"admission__mode": "async"},
            "1620 s after its start, nine tenths of timeouts.generate_s; responses that are unfinished then are cut",
        ),
        (
            {"rollout__group_deadline_s": 60, "rollout__on_group_deadline": "fail"},
            "60 s after its start; responses that are unfinished then fail their group",
        ),
    ],
    ids=["sync", "async", "given"],
)
def test_the_plan_tells_when_a_group_has_to_end(
    models: dict[str, Path], changes: dict[str, Any], deadline: str
) -> None:
    stream = StringIO()
    chosen = config(models["qwen3"], **changes)
    print_dry_run(make_plan(chosen, device="cuda", files=False), chosen, stream, Findings())
    assert f"group deadline {deadline}" in " ".join(stream.getvalue().split())


def test_dry_run_is_light(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """Without files neither torch nor vLLM nor Ray nor Megatron is imported, and no process starts."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree(models["qwen3"], data)))
    code = (
        "import sys, subprocess, os\n"
        "def refuse(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen.__init__ = refuse; os.fork = refuse; os.posix_spawn = refuse\n"
        "from megarl.cli.main import main\n"
        f"status = main(['plan', '--no-files', '--config', {str(path)!r}, 'run.steps=9'])\n"
        "heavy = {'torch', 'vllm', 'ray', 'megatron.core', 'transformers'} & set(sys.modules)\n"
        "assert status == 0 and not heavy, (status, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps: 9" in done.stdout
