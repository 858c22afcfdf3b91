"""Vision-language models in every layout against transformers, in fp32: log-probs, gradients of language and tower."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.hf.read_config import load_info
from megarl.trainer.batch import TrainSample
from tests.support.checkout import ROOT, environment
from tests.support.losses.vision_problem import (
    patches_of,
    plain_logprobs,
    plain_vision_gradients,
    reference_model,
    vision_samples,
)
from tests.support.models.tensors import merge, read_hf, worst
from tests.support.models.tiny_vision import make_tiny_vision

pytestmark = pytest.mark.world

LOGPROBS, GRADIENT = 1e-5, 1e-5
SP2 = {"tensor": 2, "sequence": True}
ALL = {"model__vision__train": "all"}
TIED = "-tied"
Case = tuple[int, str, dict[str, Any], dict[str, Any]]
FAST: list[Case] = [
    (1, "qwen2_5_vl", {}, ALL),
    (2, "qwen2_5_vl", SP2, ALL),
    (2, "qwen2_5_vl", {"pipeline": 2}, ALL),
    (2, "qwen2_5_vl", {}, ALL | {"steps": 2}),
    (1, "qwen3_vl", {}, ALL),
    (2, "qwen3_vl", SP2, ALL),
    (2, "qwen3_vl_moe", {"expert": 2}, ALL),
    (2, "qwen3_vl", {"context": 2}, ALL),
]
FULL: list[Case] = [
    (2, "qwen2_5_vl", {"tensor": 2}, ALL),
    (2, "qwen2_5_vl", {"pipeline": 2, "virtual_pipeline": 2}, ALL),
    (4, "qwen2_5_vl", {"pipeline": 2, **SP2}, ALL),
    (4, "qwen2_5_vl", SP2, ALL),
    (2, "qwen2_5_vl", SP2, ALL | {"trainer__recompute": "full"}),
    (2, "qwen3_vl", {"tensor": 2}, ALL),
    (2, "qwen3_vl", {"pipeline": 2}, ALL),
    (2, "qwen3_vl", {}, ALL),
    (2, "qwen3_vl", SP2, ALL | {"trainer__recompute": "full"}),
    (4, "qwen3_vl", {"pipeline": 2, **SP2}, ALL),
    (2, "qwen3_vl-tied", {"pipeline": 2}, ALL),
    (2, "qwen2_5_vl-tied", SP2, ALL),
    (1, "qwen3_vl_moe", {}, ALL),
    (2, "qwen3_vl_moe", SP2, ALL),
    (2, "qwen3_vl_moe", {"pipeline": 2}, ALL),
    (4, "qwen3_vl_moe", {"expert": 2, **SP2, "expert_tensor": 1}, ALL),
    (2, "qwen2_5_vl", {"context": 2}, ALL),
    (4, "qwen3_vl", {"context": 2, **SP2}, ALL),
    (4, "qwen2_5_vl", {"context": 2, "pipeline": 2}, ALL),
    (2, "qwen3_vl", {"context": 2}, ALL | {"trainer__recompute": "full"}),
    (2, "qwen3_vl_moe", {"context": 2, "expert": 2}, ALL),
    (4, "qwen2_5_vl", {"context": 4}, ALL),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("vision-models"), dict[str, Path]()

    def make(family: str) -> Path:
        if family not in made:
            (root / family).mkdir()
            tied = {"tie_word_embeddings": True} if family.endswith(TIED) else {}
            made[family] = make_tiny_vision(root / family, family.removesuffix(TIED), **tied)
        return made[family]

    return make


@pytest.fixture(scope="module")
def samples_of(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    made = dict[str, list[TrainSample]]()

    def make(family: str) -> list[TrainSample]:
        if family not in made:
            made[family] = vision_samples(model_dir(family))
        return made[family]

    return make


@pytest.fixture(scope="module")
def ran(
    world: Callable[[int], Any],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
) -> Callable[..., dict[str, Any]]:
    def get(ranks: int, family: str, layout: dict[str, Any], **options: Any) -> dict[str, Any]:
        arguments = {"samples": samples_of(family), "patches": patches_of(model_dir(family)), **options}
        results = world(ranks).run(
            "tests.support.ranks.training.vision:run", model_dir=model_dir(family), layout=layout, **arguments
        )
        return {
            "logprobs": {key: value for result in results for key, value in result["logprobs"].items()},
            "gradients": merge([result["gradients"] for result in results]),
            "weights": merge([result["weights"] for result in results]),
        }

    return get


def gap(got: dict[str, Any], model_dir: Path, samples: list[TrainSample]) -> float:
    """The largest difference of log-probs from transformers'."""
    model = reference_model(model_dir)
    with torch.no_grad():
        return max(
            float((got["logprobs"][each.key] - plain_logprobs(model, each, model_dir)).abs().max()) for each in samples
        )


def table_names(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of transformers' parameters by the names of the published files: other ones in Qwen2.5-VL only."""
    if any(name.startswith("model.language_model.layers.0.self_attn.q_norm") for name in gradients):
        return gradients
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value
        for name, value in gradients.items()
    }


def ids(case: Case) -> str:
    ranks, model, layout, options = case
    return "-".join([str(ranks), model, *(f"{k}{v}" for k, v in layout.items()), *(f"{v}" for v in options.values())])


def check(
    case: Case,
    ran: Callable[..., dict[str, Any]],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
) -> None:
    ranks, family, layout, options = case
    got, samples = ran(ranks, family, layout, **options), samples_of(family)
    assert gap(got, model_dir(family), samples) <= LOGPROBS
    if "steps" not in options:
        wanted = table_names(plain_vision_gradients(model_dir(family), samples))
        assert worst(got["gradients"], wanted) <= GRADIENT


@pytest.mark.parametrize("case", FAST, ids=ids)
def test_equals_transformers(case: Case, ran: Any, model_dir: Any, samples_of: Any) -> None:
    check(case, ran, model_dir, samples_of)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=ids)
def test_equals_transformers_everywhere(case: Case, ran: Any, model_dir: Any, samples_of: Any) -> None:
    check(case, ran, model_dir, samples_of)


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        ("qwen2_5_vl", "flat positions"),
        ("qwen2_5_vl", "axes in blocks"),
        ("qwen2_5_vl", "blank image"),
        ("qwen2_5_vl", "normalised twice"),
        ("qwen3_vl", "axes in blocks"),
        ("qwen3_vl", "deepstack one layer late"),
    ],
)
def test_a_mistake_shows_in_the_logprobs(family: str, mistake: str, ran: Any, model_dir: Any, samples_of: Any) -> None:
    got = ran(1, family, {}, mistake=mistake, steps=0)
    assert gap(got, model_dir(family), samples_of(family)) > 0.01


def test_features_of_other_chunks_show_in_the_logprobs(ran: Any, model_dir: Any, samples_of: Any) -> None:
    got = ran(2, "qwen2_5_vl", {"context": 2}, mistake="features of other chunks", steps=0)
    assert gap(got, model_dir("qwen2_5_vl"), samples_of("qwen2_5_vl")) > 0.01


def test_the_image_of_another_prompt_shows_in_the_logprobs(ran: Any, model_dir: Any, samples_of: Any) -> None:
    directory = model_dir("qwen2_5_vl")
    shown = patches_of(directory)
    got = ran(1, "qwen2_5_vl", {}, patches={**shown, "a": shown["a"][::-1].copy()}, steps=0)
    assert gap(got, directory, samples_of("qwen2_5_vl")) > 0.01


def test_a_tower_gradient_summed_over_tensor_ranks_shows(ran: Any, model_dir: Any, samples_of: Any) -> None:
    family = "qwen2_5_vl"
    got = ran(2, family, SP2, mistake="summed over tensor ranks", **ALL)["gradients"]
    wanted = table_names(plain_vision_gradients(model_dir(family), samples_of(family)))
    towers = [{name: each[name] for name in wanted if name.startswith("visual.")} for each in (got, wanted)]
    assert worst(*towers) > 0.9


@pytest.mark.parametrize(("trained", "changes"), [("none", 0), ("projector", 5), ("all", 54)])
def test_the_config_says_what_of_the_tower_is_trained(trained: str, changes: int, ran: Any, model_dir: Any) -> None:
    got = ran(1, "qwen2_5_vl", {}, model__vision__train=trained)["weights"]
    before = read_hf(model_dir("qwen2_5_vl"))
    tower = {name: value for name, value in table_names(before).items() if name.startswith("visual.")}
    changed = [name for name, value in tower.items() if not torch.equal(got[name], value)]
    assert len(changed) == changes
    assert all("merger" in name for name in changed) or trained == "all"


@pytest.mark.parametrize(("family", "trained"), [("qwen2_5_vl", 5), ("qwen3_vl", 18)])
def test_what_is_trained_has_the_gradient_of_transformers(
    family: str, trained: int, ran: Any, model_dir: Any, samples_of: Any
) -> None:
    got = ran(2, family, SP2, model__vision__train="projector")["gradients"]
    wanted = table_names(plain_vision_gradients(model_dir(family), samples_of(family)))
    assert worst(got, {name: wanted[name] for name in got}) <= GRADIENT
    assert sum("visual." in name for name in got) == trained


@pytest.fixture(scope="module")
def passes(world: Callable[[int], Any], model_dir: Any, samples_of: Any) -> Callable[..., dict[str, Any]]:
    def get(family: str, **options: Any) -> dict[str, Any]:
        directory, run = model_dir(family), "tests.support.ranks.training.vision:passes_of_a_step"
        arguments = {"model_dir": directory, "samples": samples_of(family), "patches": patches_of(directory)}
        options |= {"trainer__micro_batch_tokens": 64}  # so that samples of one image are in several
        [result] = world(1).run(run, layout={}, **arguments, **options)
        return dict(result)

    return get


def furthest(some: dict[str, Any], others: dict[str, Any]) -> list[float]:
    """The largest difference of the log-probs of each pass."""
    passes = zip(some["logprobs"], others["logprobs"], strict=True)
    return [max(float((a - b).abs().max()) for a, b in zip(*each, strict=True)) for each in passes]


@pytest.mark.parametrize(
    ("family", "trained"),
    [("qwen2_5_vl", "none"), ("qwen2_5_vl", "projector"), ("qwen2_5_vl", "all"), ("qwen3_vl", "projector")],
)
def test_a_frozen_tower_sees_each_image_once_in_a_step(family: str, trained: str, passes: Any, model_dir: Any) -> None:
    """Once for all samples, passes and updates; a trained one sees it each time. The log-probs are the same."""
    got = passes(family, keeps=True, model__vision__train=trained)
    plain = passes(family, keeps=False, model__vision__train=trained)
    distinct = sum(map(len, patches_of(model_dir(family)).values()))
    assert [reference for _, reference in got["seen"]] == [distinct, distinct]
    assert [own == distinct for own, _ in got["seen"]] == [trained != "all"] * 2
    assert all(most > distinct for of_step in plain["seen"] for most in of_step)
    assert max(furthest(got, plain)) <= 1e-6
    assert 0 < got["kept"] <= got["planned"] and plain["kept"] == 0


def test_features_kept_behind_a_trained_projector_show(passes: Any) -> None:
    """They are those of its weights before the update."""
    options = {"keeps": True, "model__vision__train": "projector"}
    got, stale = passes("qwen2_5_vl", **options), passes("qwen2_5_vl", **options, mistake="kept behind the projector")
    before, reference, after, *_ = furthest(got, stale)
    assert max(before, reference) <= 1e-6 < 1e-4 < after


def test_patches_bound_the_micro_batches(ran: Any, model_dir: Any, samples_of: Any) -> None:
    one = ran(1, "qwen2_5_vl", {}, **ALL)["gradients"]
    most = max(sample.image_tokens for sample in samples_of("qwen2_5_vl")) * 4
    assert worst(ran(1, "qwen2_5_vl", {}, **ALL, trainer__micro_batch_patches=most)["gradients"], one) <= GRADIENT
    with pytest.raises(AssertionError, match=f"micro_batch_patches={most - 1}; raise it to at least {most}"):
        ran(1, "qwen2_5_vl", {}, **ALL, trainer__micro_batch_patches=most - 1)


def test_a_sampled_image_token_is_text(ran: Any, model_dir: Any, samples_of: Any) -> None:
    """transformers would take it for a second image, so it is compared with the model that has it as a text's token."""
    family, swapped = "qwen2_5_vl", []
    image_token = load_info(model_dir(family)).raw["image_token_id"]
    for sample in samples_of(family):
        swapped.append(replace(sample, response_ids=[*sample.response_ids[:2], image_token, *sample.response_ids[3:]]))
    got = ran(1, family, {}, samples=swapped, steps=0)
    before = ran(1, family, {}, steps=0)
    for sample in swapped:
        mine, other = got["logprobs"][sample.key], before["logprobs"][sample.key]
        assert torch.equal(mine[:2], other[:2]) and (mine[3:] - other[3:]).abs().max() > 1e-3
    text = next(sample for sample in swapped if not sample.images)
    with torch.no_grad():
        wanted = plain_logprobs(reference_model(model_dir(family)), text, model_dir(family))
    assert (got["logprobs"][text.key] - wanted).abs().max() <= LOGPROBS


@pytest.mark.parametrize("trained", ["projector", "all"])
def test_a_checkpoint_goes_on_in_another_layout(
    trained: str, world: Callable[[int], Any], model_dir: Any, samples_of: Any, tmp_path: Path
) -> None:
    family, results = "qwen2_5_vl", []
    for layout in (SP2, {"pipeline": 2}):
        parts = world(2).run(
            "tests.support.ranks.training.vision:save_and_resume",
            model_dir=model_dir(family), layout=layout, samples=samples_of(family),
            patches=patches_of(model_dir(family)), root=tmp_path / "checkpoints", model__vision__train=trained,
        )  # fmt: skip
        results.append({name: merge([part[name] for part in parts]) for name in ("saved", "end")})
        assert {part["resumed"] for part in parts} == {layout != SP2}
    (saved, end), (loaded, resumed) = (each.values() for each in results)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    before = read_hf(model_dir(family))
    updates = [{name: each[name] - before[name] for name in end if not torch.equal(end[name], before[name])}
               for each in (end, resumed)]  # fmt: skip
    assert worst(*updates) <= 1e-3


TEXT = """
import megarl.chat.tokenize
from megarl.data.dataset import load_prompts, row_mistakes
from megarl.config.schema.data import DataConfig
from tests.support.checkout import PROMPTS
data = DataConfig(path=PROMPTS)
assert not [*row_mistakes(PROMPTS, data)]
assert load_prompts(PROMPTS, data)[0].text
"""


@pytest.mark.parametrize(
    "program",
    [
        "import megarl.trainer.policy, megarl.models.megatron.build_model, megarl.config.memory_plan.plan",
        "import megarl.run.loop.session, megarl.queue.transfer",
        "import megarl.rollout.orchestrator.pool_controller, megarl.rollout.engine.replica",
        "import megarl.rollout.workers.agent_worker, megarl.gateway.actor",
        TEXT,
    ],
    ids=["trainer", "rank", "controller", "gateway", "prompts"],
)
def test_a_run_of_text_imports_nothing_of_vision(program: str) -> None:
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=True)
    wrong = (
        "vision_model",
        "packed_images",
        "image_inputs",
        "PIL.Image",
        "image_processing",
        "transformers.models.qwen",
    )
    assert [name for name in ran.stdout.split() if any(part in name for part in wrong)] == []
