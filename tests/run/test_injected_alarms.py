"""Faults that are put into a step of a real policy raise the alarm of docs/observability/monitor.md, and no other."""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.queue.trajectory import Trajectory, VersionSpan
from tests.support.losses.rl_problem import TEMPERATURE, dense_dims
from tests.support.models.tiny import make_tiny_model

pytestmark = [pytest.mark.world, pytest.mark.slow]

GROUPS, SAMPLES, TOKENS = 6, 4, 20
NOISE = 0.01  # between an engine and the trainer, as in bf16
# No update moves the policy, so that every step is on policy, and the fault is the only difference.
STILL = {
    "trainer__optimizer__lr": 1e-12, "algorithm__kl": {"coef": 0.0}, "algorithm__entropy_coef": 0.0,
    "monitor__min_tokens": 100,
}  # fmt: skip


def saved_with_head(model_dir: Path, target: Path, scale: float) -> Path:
    """The same model whose logits are `scale` times as large, and therefore its entropy smaller."""
    make_tiny_model(target, **dense_dims())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= scale
    model.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy with an entropy as language models have it (`sharp`), and one that has collapsed."""
    root = tmp_path_factory.mktemp("alarms")
    plain = make_tiny_model(root / "plain", **dense_dims())
    return {
        name: saved_with_head(plain, root / name, scale) for name, scale in (("sharp", 2.0), ("collapsed", 20000.0))
    }


@torch.no_grad()
def responses(
    model: torch.nn.Module, prompts: list[list[int]], temperature: float, seed: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Responses of an engine with this model, and the log-probs that it returns."""
    generator = torch.Generator().manual_seed(seed)
    ids, logprobs = torch.tensor(prompts), []
    for _ in range(TOKENS):
        log_p = torch.log_softmax(model(input_ids=ids).logits[:, -1].float() / temperature, dim=-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        logprobs.append(log_p.gather(1, drawn))
        ids = torch.cat([ids, drawn], dim=1)
    noise = NOISE * torch.randn(len(prompts), TOKENS, generator=generator)
    return ids[:, len(prompts[0]) :].tolist(), (torch.cat(logprobs, dim=1) + noise).tolist()


def batch(
    model_dir: Path, version: int, *, temperature: float = TEMPERATURE, wrong: Callable[[Any], None] | None = None
) -> list[Trajectory]:
    """A batch of two replicas, of which the second one has the groups with odd numbers.

    `wrong`: changes the weights of replica 1.
    """
    return list(generated(model_dir, version, temperature, wrong))


@functools.cache  # several tests take the same batch
def generated(
    model_dir: Path, version: int, temperature: float, wrong: Callable[[Any], None] | None
) -> tuple[Trajectory, ...]:
    rows = []
    for replica in range(2):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if replica == 1 and wrong is not None:
            wrong(model)
        owned = range(version * GROUPS + replica, (version + 1) * GROUPS, 2)
        prompts = [[5 + group % 50, 7, 9] for group in owned for _ in range(SAMPLES)]
        ids, logprobs = responses(model, prompts, temperature, seed=100 * version + replica)
        for number, (response, values) in enumerate(zip(ids, logprobs, strict=True)):
            group, index = owned[number // SAMPLES], number % SAMPLES
            spans = (VersionSpan(version, 0, TOKENS, replica=replica),)
            rows.append(Trajectory(group, index, prompts[number], response, values, spans, "stop", float(index % 2)))
    return tuple(rows)


def run(world: Any, model: Path, steps: list[list[Trajectory]], **changes: Any) -> list[dict[str, Any]]:
    """The steps on two DP ranks, which have to agree about everything."""
    one, other = world(2).run(
        "tests.support.ranks.training.alarms:watched", model_dir=model, steps=steps, **STILL | changes
    )
    changed = [mine.pop("changed") | theirs.pop("changed") for mine, theirs in zip(one, other, strict=True)]
    for step in (*one, *other):
        step["metrics"].pop("mismatch/logprob_pearson")  # NaN where nothing varies, which equals nothing
    assert one == other, "the ranks have come to different alarms"
    return [{**step, "changed": each} for step, each in zip(one, changed, strict=True)]


def alarms(step: dict[str, Any]) -> list[str]:
    """The names of the rules that have printed something in a step."""
    return [text.removeprefix("alarm ").split(":")[0] for text in step["said"]]


def test_sound_engines_raise_no_alarm(world: Any, models: dict[str, Path]) -> None:
    for step in run(world, models["sharp"], [batch(models["sharp"], version) for version in range(4)]):
        assert step["said"] == step["taken"] == [] and not step["publishes"] and step["changed"]
        assert step["metrics"]["monitor/alarms"] == 0 and step["metrics"]["monitor/replica_gap_max"] < 2
        assert step["metrics"]["monitor/logprob_gap"] == pytest.approx(NOISE * (2 / torch.pi) ** 0.5, rel=0.15)


@torch.no_grad()
def damage(model: torch.nn.Module) -> None:
    """One matrix of one layer is of other weights, as after a bucket that was loaded into a wrong place."""
    weight = model.model.layers[2].mlp.down_proj.weight
    weight.copy_(weight.roll(1, 0))


@pytest.mark.parametrize("old", ["rollout", "trainer"], ids=["compared in the update", "compared in a pass"])
def test_a_replica_with_wrong_weights_is_named_within_one_step_and_the_other_is_not(
    world: Any, models: dict[str, Path], old: str
) -> None:
    steps = [batch(models["sharp"], 0), batch(models["sharp"], 1, wrong=damage)]
    sound, sick = run(world, models["sharp"], steps, algorithm__old_logprobs=old)
    assert sound["taken"] == [] and sick["taken"] == [1]
    metrics = sick["metrics"]
    assert metrics["monitor/quarantined"] == 1 and metrics["monitor/replica_gap_max"] > 4
    assert metrics["mismatch/replica/0/logprob_abs_diff"] < 0.02 < metrics["mismatch/replica/1/logprob_abs_diff"]
    assert metrics["mismatch/replica/0/tokens"] == metrics["mismatch/replica/1/tokens"] == GROUPS * SAMPLES * TOKENS / 2


def test_a_wrong_temperature_raises_logprob_gap(world: Any, models: dict[str, Path]) -> None:
    steps = [batch(models["sharp"], version, temperature=1.5 * TEMPERATURE) for version in range(2)]
    first, second = run(world, models["sharp"], steps)
    assert alarms(first) == [] and alarms(second) == ["logprob_gap"]
    assert first["taken"] == second["taken"] == [], "all replicas have it, so none is accused"


def shifted(row: Trajectory) -> Trajectory:
    """Each log-prob is that of the token before."""
    return replace(row, rollout_logprobs=row.rollout_logprobs[-1:] + row.rollout_logprobs[:-1])


def test_log_probs_that_are_shifted_by_one_token_raise_every_alarm_of_the_comparison(
    world: Any, models: dict[str, Path]
) -> None:
    steps = [[shifted(row) for row in batch(models["sharp"], version)] for version in range(3)]
    first, second, third = run(world, models["sharp"], steps)
    assert alarms(first) == [] and alarms(second) == ["logprob_gap"]
    assert set(alarms(third)) == {"ess", "k3_kl", "ratio_tail"}
    assert third["metrics"]["monitor/active"] == 4


def test_a_collapsed_policy_raises_entropy(world: Any, models: dict[str, Path]) -> None:
    """Its log-probs are compared as those of any other: all are near 0."""
    steps = [batch(models["collapsed"], version) for version in range(3)]
    found = run(world, models["collapsed"], steps)
    assert [alarms(step) for step in found] == [[], [], ["entropy"]]
    assert found[0]["metrics"]["policy/entropy"] < 0.003


@pytest.mark.parametrize(("action", "error"), [("skip", "AlarmSkipsStep"), ("stop", "AlarmStopsRun")])
@pytest.mark.parametrize("old", ["rollout", "trainer"])
def test_the_batch_of_an_alarm_that_skips_or_stops_changes_no_weight(
    world: Any, models: dict[str, Path], action: str, error: str, old: str
) -> None:
    act = {"monitor__rules__k3_kl": {"action": action, "patience": 2}, "monitor__rules__logprob_gap__action": "off"}
    steps = [[shifted(row) for row in batch(models["sharp"], version)] for version in range(2)]
    first, second = run(
        world, models["sharp"], steps,
        **STILL | act | {"trainer__optimizer__lr": 1e-4, "algorithm__old_logprobs": old, "trainer__mini_batches": 1},
    )  # fmt: skip
    assert first["changed"] and not first["ended"]
    assert not second["changed"] and second["ended"].startswith(f"{error} after 0 updates: alarm k3_kl: ")
    assert second["metrics"]["monitor/skipped"] == (action == "skip") and second["metrics"]["mismatch/k3_kl"] > 0.1


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=["TP", "PP"])
def test_every_layout_finds_the_same_numbers(world: Any, models: dict[str, Path], layout: dict[str, int]) -> None:
    rows = batch(models["sharp"], 0, wrong=damage)
    both = partial(world(2).run, "tests.support.ranks.training.alarms:watched", model_dir=models["sharp"], steps=[rows])
    names = [
        f"mismatch/{part}"
        for part in ("replica/0/tokens", "replica/0/logprob_abs_diff", "replica/1/logprob_abs_diff", "lag/0/ess")
    ]
    expected = both(**STILL)[0][0]
    for [found] in both(layout=layout, **STILL):
        assert found["taken"] == expected["taken"] == [1]
        for name in names:
            assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-4)


def in_two_updates(model_dir: Path) -> list[Trajectory]:
    """Four groups of replica 0 and then two of replica 1, which is wrong: replica 1 is in the second update only."""
    made = [row for version in range(2) for row in batch(model_dir, version, wrong=damage)]
    number_of = {0: 0, 2: 1, 4: 2, 6: 3, 7: 4, 9: 5}
    return [
        replace(row, group_id=number_of[row.group_id], versions=(replace(row.versions[0], version=0),))
        for row in made
        if row.group_id in number_of
    ]


TWO = {"trainer__mini_batches": 2, "algorithm__correction": {"kind": "none"}, "monitor__min_tokens": 80}


def test_all_mini_batches_are_compared_before_a_replica_is_judged(world: Any, models: dict[str, Path]) -> None:
    """The metrics are those from before the first update; the tokens of the second one are one update older."""
    [step] = run(world, models["sharp"], [in_two_updates(models["sharp"])], **TWO)
    metrics = step["metrics"]
    assert metrics["mismatch/replica/0/tokens"] == 3 * SAMPLES * TOKENS and "mismatch/replica/1/tokens" not in metrics
    assert step["taken"] == [1]


def test_a_pass_compares_all_tokens_with_the_weights_before_the_first_update(
    world: Any, models: dict[str, Path]
) -> None:
    rows = in_two_updates(models["sharp"])
    [step] = run(world, models["sharp"], [rows], algorithm__old_logprobs="trainer", **TWO)
    metrics = step["metrics"]
    assert (metrics["mismatch/replica/0/tokens"], metrics["mismatch/replica/1/tokens"]) == (320, 160)
    assert metrics["mismatch/lag/0/tokens"] == 480 and "mismatch/lag/1/tokens" not in metrics
    assert step["taken"] == [1]
