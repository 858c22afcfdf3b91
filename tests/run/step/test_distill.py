"""Distillation and demonstrations in a step: exact values, in every layout, mixed with other data sets."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.queue.streams import ADVANTAGES, TEACHER_LOGPROBS
from megarl.queue.trajectory import Trajectory, VersionSpan
from tests.support.checkpoints.converter import convert
from tests.support.losses.rl_problem import dense_dims, make_samples, plain_logprobs
from tests.support.losses.samples import train_sample
from tests.support.models.tensors import merge
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.world

LAYOUTS = {
    "one rank": (1, {}),
    "two replicas": (2, {}),
    "two tensor ranks": (2, {"tensor": 2}),
    "two stages": (2, {"pipeline": 2}),
}
SAMPLES = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The policy, a teacher that is wider and deeper than it, and one of its own size."""
    root = tmp_path_factory.mktemp("distill")
    return {
        "policy": make_tiny_model(root / "policy", **dense_dims()),
        "big": make_tiny_model(root / "big", seed=7, **dense_dims(num_hidden_layers=8, intermediate_size=96)),
        "small": make_tiny_model(root / "small", seed=8, **dense_dims()),
    }


@pytest.fixture(scope="module")
def rows(models: dict[str, Path]) -> list[Trajectory]:
    """Four groups: of `math`, `code` and `chat`, and one of demonstrations. The rewards of `math` are equal."""
    made = []
    for number, sample in enumerate(make_samples(models["policy"], count=4 * SAMPLES)):
        group, index = divmod(number, SAMPLES)
        length, name = len(sample.response_ids), ("math", "code", "chat", "shown")[group]
        mask = [1] * length if name == "shown" or length < 4 else [1, 0, *[1] * (length - 2)]
        made.append(
            Trajectory(
                group, index, sample.prompt_ids, sample.response_ids,
                [0.0] * length if name == "shown" else sample.streams["old_logprobs"].tolist(),
                () if name == "shown" else (VersionSpan(0, 0, length),), "stop",
                float(index == 0 and name not in ("math", "shown")), response_mask=mask, dataset=name,
                demonstrated=name == "shown",
            )
        )  # fmt: skip
    return made


def sets(**teachers: str) -> list[dict[str, Any]]:
    own = {"math": "", "code": "", "chat": ""} | teachers
    found: list[dict[str, Any]] = [
        {"name": name, "path": "unused", "teacher": teacher} for name, teacher in own.items()
    ]
    return [*found, {"name": "shown", "path": "unused", "demonstration_field": "reply"}]


def held(models: dict[str, Path], *names: str) -> list[dict[str, Any]]:
    return [{"name": name, "path": models[name], "where": "trainer"} for name in names]


def changes(models: dict[str, Path], where: str, **more: Any) -> dict[str, Any]:
    """`math` learns from `big`, `code` from `small`, `chat` from its rewards alone."""
    return {
        "algorithm__kl__coef": 0.0,
        "algorithm__entropy_coef": 0.0,
        "algorithm__distill": {"where": where, "coef": 0.7},
        "teachers": held(models, "big", "small"),
        "data": {"sets": sets(math="big", code="small")},
        **more,
    }


def run(world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory], ranks: int, layout: Any,
        **options: Any) -> list[dict[str, Any]]:  # fmt: skip
    found: list[dict[str, Any]] = world(ranks).run(
        "tests.support.ranks.training.distill:stepped", timeout=240, model_dir=models["policy"], layout=layout,
        rows=rows,
        **options,
    )  # fmt: skip
    return found


def expected_logprobs(model: Path, row: Trajectory) -> torch.Tensor:
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return plain_logprobs(plain, train_sample(row.key, row.prompt_ids, row.response_ids))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_data_set_learns_from_its_own_teacher(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory], layout: str
) -> None:
    got = run(world, models, rows, *LAYOUTS[layout], **changes(models, "advantage"))
    streams = {key: value for part in got for key, value in part["streams"].items()}
    assert sorted(streams) == sorted(row.key for row in rows), "equal rewards must not drop a group with a teacher"
    kl: dict[str, list[float]] = {"math": [], "code": []}
    for row in rows:
        own = streams[row.key]
        if row.dataset not in kl:
            assert TEACHER_LOGPROBS not in own
            continue
        teacher_R = expected_logprobs(models["big" if row.dataset == "math" else "small"], row)
        torch.testing.assert_close(own[TEACHER_LOGPROBS], teacher_R, atol=3e-5, rtol=0)
        k1_R = torch.tensor(row.rollout_logprobs) - teacher_R
        torch.testing.assert_close(own[ADVANTAGES], -0.7 * k1_R, atol=3e-5, rtol=0)
        kl[row.dataset] += k1_R[torch.tensor(row.response_mask) == 1].tolist()
    metrics = got[0]["metrics"]
    for name, values in kl.items():
        assert metrics[f"data/{name}/teacher_kl"] == pytest.approx(sum(values) / len(values), abs=3e-5)
    both = kl["math"] + kl["code"]
    assert metrics["policy/teacher_kl"] == pytest.approx(sum(both) / len(both), abs=3e-5)
    assert metrics["policy/ce_tokens"] == sum(len(row.response_ids) for row in rows if row.demonstrated)
    assert metrics["mismatch/tokens"] == sum(sum(row.response_mask) for row in rows if not row.demonstrated)


@pytest.mark.parametrize("where", ["advantage", "loss"])
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_gradients_agree_with_one_rank(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory], layout: str, where: str
) -> None:
    own = changes(models, where)
    alone = merge([part["gradients"] for part in run(world, models, rows, 1, {}, **own)])
    got = run(world, models, rows, *LAYOUTS[layout], **own)
    assert merge([part["gradients"] for part in got]).keys() == alone.keys()
    for name, value in merge([part["gradients"] for part in got]).items():
        torch.testing.assert_close(value, alone[name], atol=2e-5, rtol=1e-3)
    assert max(float(value.abs().max()) for value in alone.values()) > 1e-3


def test_the_term_of_the_loss_leaves_out_whoever_has_no_teacher(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    (got,) = run(world, models, rows, 1, {}, **changes(models, "loss"))
    taught = [row for row in rows if row.dataset in ("math", "code")]
    assert got["metrics"]["policy/ref_kl_tokens"] == sum(sum(row.response_mask) for row in taught)
    for row in rows:
        own = got["streams"][row.key]
        if row in taught:
            assert "ref_kl_weights" not in own and not own[ADVANTAGES].any(), "the teacher is its only signal"
        else:
            assert not own["ref_kl_weights"].any() and not own[TEACHER_LOGPROBS].any()
    squared = []
    for row in taught:
        policy_R = expected_logprobs(models["policy"], row)
        teacher_R = expected_logprobs(models["big" if row.dataset == "math" else "small"], row)
        squared += (0.5 * (policy_R - teacher_R) ** 2)[torch.tensor(row.response_mask) == 1].tolist()
    assert got["metrics"]["policy/kl_ref"] == pytest.approx(sum(squared) / len(squared), rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    ["one rank", *(pytest.param(each, marks=pytest.mark.slow) for each in ("two tensor ranks", "two stages"))],
)
def test_a_teacher_may_be_a_megatron_checkpoint(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory], tmp_path: Path, layout: str
) -> None:
    """The converter's, in any layout: the log-probs are those of the Hugging Face directory, bit by bit."""
    convert("import", "--hf", models["big"], "--out", tmp_path / "megatron")
    own = changes(models, "advantage")
    wanted = run(world, models, rows, *LAYOUTS[layout], **own)
    own["teachers"][0]["path"] = tmp_path / "megatron"
    got = run(world, models, rows, *LAYOUTS[layout], **own)
    taught = [row.key for row in rows if row.dataset == "math"]
    for mine, theirs in zip(got, wanted, strict=True):
        for key in taught:
            assert torch.equal(mine["streams"][key][TEACHER_LOGPROBS], theirs["streams"][key][TEACHER_LOGPROBS])
    (tmp_path / "megatron").rename(tmp_path / "big")
    convert("import", "--hf", models["small"], "--out", tmp_path / "megatron")
    other = run(world, models, rows, *LAYOUTS[layout], **own)
    assert not torch.equal(
        other[0]["streams"][taught[0]][TEACHER_LOGPROBS], got[0]["streams"][taught[0]][TEACHER_LOGPROBS]
    )


def test_rewards_can_be_trained_too(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    own = changes(models, "advantage")
    (alone,) = run(world, models, rows, 1, {}, **own)
    own["algorithm__distill"] = {"where": "advantage", "coef": 0.7, "rewards": True}
    (both,) = run(world, models, rows, 1, {}, **own)
    for row in rows:
        more_R = both["streams"][row.key][ADVANTAGES] - alone["streams"][row.key][ADVANTAGES]
        wanted = {"code": (0.7071, -0.7071)}.get(row.dataset, (0.0, 0.0))[row.sample_index]
        torch.testing.assert_close(more_R, torch.full_like(more_R, wanted), atol=1e-3, rtol=0)


def test_engines_bring_their_log_probs_with_the_rows(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    """The same step as if the trainer held the teachers; a row without them is an error, and no silent zero."""
    own = changes(models, "advantage")
    (wanted,) = run(world, models, rows, 1, {}, **own)
    own["teachers"] = [{**each, "where": "engine"} for each in own["teachers"]]
    scored = [
        replace(row, streams={TEACHER_LOGPROBS: wanted["streams"][row.key][TEACHER_LOGPROBS].tolist()})
        if row.dataset in ("math", "code")
        else row
        for row in rows
    ]
    got = run(world, models, scored, 2, {}, **own)
    assert all(not part["passes"] for part in got)
    for name, value in merge([part["gradients"] for part in got]).items():
        torch.testing.assert_close(value, merge([wanted["gradients"]])[name], atol=2e-5, rtol=1e-3)
    with pytest.raises(Exception, match=r"sample 0:0 has no log-probs of teacher big, whose engines had to score it"):
        run(world, models, rows, 1, {}, **own)


def test_a_batch_in_which_no_row_has_a_teacher_can_be_trained(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    """Engines bring log-probs with the rows that they score; the loss needs the stream in any case."""
    own = changes(models, "loss")
    own["teachers"] = [{**each, "where": "engine"} for each in own["teachers"]]
    (got,) = run(world, models, [row for row in rows if row.demonstrated], 1, {}, **own)
    assert got["metrics"]["policy/updates"] == 1 and "policy/ref_kl_tokens" not in got["metrics"]


def test_demonstrations_alone_are_learnt_by_their_cross_entropy(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    shown = [row for row in rows if row.demonstrated]
    own = {"data": {"sets": sets()}, "algorithm__entropy_coef": 0.0, "algorithm__advantage": "reinforce_pp"}
    (got,) = run(world, models, shown, 1, {}, **own)
    entropies = [value for row in shown for value in (-expected_logprobs(models["policy"], row)).tolist()]
    metrics = got["metrics"]
    assert metrics["policy/ce"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert metrics["policy/loss"] == pytest.approx(metrics["policy/ce"], rel=1e-4)
    assert metrics["policy/updates"] == 1 and metrics["policy/policy_loss"] == 0
    assert not any(name.startswith(("reward/", "policy/advantage")) for name in metrics)


def test_demonstrations_change_no_advantage_of_other_samples(
    world: Callable[[int], Any], models: dict[str, Path], rows: list[Trajectory]
) -> None:
    """REINFORCE++ has a baseline of the whole batch, in which the rewards of demonstrations must not be."""
    own = {"data": {"sets": sets()}, "algorithm__advantage": "reinforce_pp"}
    (mixed,) = run(world, models, rows, 1, {}, **own)
    (alone,) = run(world, models, [row for row in rows if not row.demonstrated], 1, {}, **own)
    for key, streams in alone["streams"].items():
        assert torch.equal(streams[ADVANTAGES], mixed["streams"][key][ADVANTAGES])
    assert mixed["metrics"]["policy/advantage_std"] == alone["metrics"]["policy/advantage_std"]
