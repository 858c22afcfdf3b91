"""The prompts of a run: every one that is drawn fits, with its response, where it has to go."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError, RolloutError
from megarl.config.checks.sections import check, evaluation_prompt_limit, prompt_limit
from megarl.config.schema import AdmissionConfig, Config
from megarl.data.curriculum import TrainingProgress
from megarl.data.dataset import PromptDataset
from megarl.data.mixture import epoch_order
from megarl.models.hf.read_config import load_info
from megarl.rollout.tasks.prompts import PromptSource
from tests.support.models.tiny import make_tiny_model
from tests.support.pool.pool import pool_config
from tests.support.trainer.configs import write_problems

RESPONSE = 16
SAMPLES = 4


def config(tmp_path: Path, model: Path, **sections: Any) -> Config:
    return pool_config(tmp_path, model, **{"data": {"max_prompt_tokens": None}, **sections})


@pytest.mark.parametrize(
    ("sections", "tokens", "setting"),
    [
        ({"data": {"max_prompt_tokens": 64}}, 64, "data.max_prompt_tokens"),
        ({"trainer": {"micro_batch_tokens": 100}}, 84, "trainer.micro_batch_tokens - sampling.max_tokens"),
        # Longer responses of an evaluation are never packed.
        ({"trainer": {"micro_batch_tokens": 100}, "evaluation": {"max_tokens": 48}}, 84, "trainer.micro_batch_tokens"),
        ({"rollout": {"max_model_len": 90}}, 74, "rollout.max_model_len - the longest response"),
        ({}, 512 - RESPONSE, "the model's positions - the longest response"),
    ],
)
def test_the_tightest_setting_bounds_a_prompt(
    model: Path, tmp_path: Path, sections: dict[str, Any], tokens: int, setting: str
) -> None:
    planned = config(tmp_path, model, **sections)
    check(planned, device="cpu")
    limit = prompt_limit(planned, load_info(model))
    assert limit.tokens == tokens and limit.setting.startswith(setting)


def test_what_is_only_evaluated_needs_no_room_in_a_micro_batch(model: Path, tmp_path: Path) -> None:
    planned = config(tmp_path, model, trainer={"micro_batch_tokens": 100})
    assert evaluation_prompt_limit(planned, load_info(model)).tokens == 512 - RESPONSE
    assert len(PromptSource(planned).eval_sets()) == 1


def test_a_prompt_that_no_micro_batch_could_hold_is_refused_or_left_out_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    lengths = [len(PromptSource(config(tmp_path, model)).draw(group).ids) for group in range(32)]
    room = sorted(set(lengths))[-2]
    trainer = {"micro_batch_tokens": room + RESPONSE}
    with pytest.raises(ValueError, match=rf"more than trainer.micro_batch_tokens - sampling.max_tokens = {room}"):
        PromptSource(config(tmp_path, model, trainer=trainer))
    skipping = {"max_prompt_tokens": None, "overlong_prompts": "skip"}
    source = PromptSource(config(tmp_path, model, trainer=trainer, data=skipping))
    assert source.skipped == sum(length > room for length in lengths) > 0
    assert max(len(source.draw(group).ids) for group in range(32)) <= room


def test_one_file_is_drawn_in_the_order_of_the_seed(model: Path, tmp_path: Path) -> None:
    """Bit for bit what it was before there could be several sets, so that checkpoints of then resume."""
    source = PromptSource(config(tmp_path, model, run={"seed": 3}))
    drawn = [source.draw(group) for group in range(32)]
    assert [each.prompt.index for each in drawn] == epoch_order(32, 3, 0).tolist()
    assert source.state_dict() == {"n": 32, "seed": 3, "shuffle": True, "drawn": 0}
    assert {(each.dataset, each.reward, each.sampling.max_tokens) for each in drawn} == {("", 0, RESPONSE)}
    source.load_state_dict(source.state_dict(), 7, 1)


def test_the_problem_of_a_group_is_read_once_until_the_group_is_finished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = PromptSource(config(tmp_path, model)), PromptDataset.__getitem__
    reads: list[int] = []

    def counted(dataset: PromptDataset, index: int) -> Any:
        reads.append(index)
        return read(dataset, index)

    monkeypatch.setattr(PromptDataset, "__getitem__", counted)
    drawn = source.draw(4)
    assert source.draw(4) is drawn and source.reference(4) == drawn.answer and len(reads) == 1
    source.finish(4, [])
    assert source.reference(4) == drawn.answer and source.draw(4) == drawn and len(reads) == 3
    source.load_state_dict(source.state_dict(), 5, 1)
    assert source.draw(4) == drawn and len(reads) == 4


SIZES = {"small": 6, "large": 20}


def several(directory: Path, model: Path, own: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Set `small` has a third of the groups, and `own` keys."""
    files = {name: directory / f"{name}.jsonl" for name in SIZES}
    for name, size in SIZES.items():
        if not files[name].exists():  # a source that is open refuses a file that changes
            write_problems(files[name], size, 50 * size)
    sets = [
        {"name": "small", "path": files["small"], "weight": 1.0, **(own or {})},
        {"name": "large", "path": files["large"], "weight": 2.0},
    ]
    fields = {"path": None, "sets": sets, **sections.pop("data", {})}
    return config(directory, model, data=fields, **sections)


def test_groups_take_their_prompts_from_the_sets_by_weight_and_each_prompt_once_per_epoch(
    model: Path, tmp_path: Path
) -> None:
    source = PromptSource(several(tmp_path, model))
    drawn = [source.draw(group) for group in range(3 * 18)]
    assert Counter(each.dataset for each in drawn) == {"small": 18, "large": 36}
    for name, size in SIZES.items():
        indices = [each.prompt.index for each in drawn if each.dataset == name]
        for epoch in range(len(indices) // size):
            assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert [source.draw(group) for group in (7, 3)] == [drawn[7], drawn[3]]
    assert source.dataset(5) == drawn[5].dataset and source.reference(5) == drawn[5].answer
    assert [PromptSource(several(tmp_path, model)).draw(group) for group in range(9)] == drawn[:9]
    other = PromptSource(several(tmp_path, model, run={"seed": 1}))
    assert [other.draw(group).prompt.index for group in range(54)] != [each.prompt.index for each in drawn]


def test_what_a_set_has_for_itself_reaches_its_prompts_and_no_other(model: Path, tmp_path: Path) -> None:
    own = {
        "system_prompt": "Be quick.",
        "suffix": " Go.",
        "reward": {"function": "gsm8k"},
        "sampling": {"temperature": 0.5, "max_tokens": 7},
    }
    source = PromptSource(several(tmp_path, model, own))
    by_set = {each.dataset: each for each in (source.draw(group) for group in range(6))}
    small, large = by_set["small"], by_set["large"]
    assert small.prompt.messages[0] == {"role": "system", "content": "Be quick."} and small.prompt.text.endswith(" Go.")
    assert len(large.prompt.messages) == 1 and large.prompt.text.endswith("=?")
    assert (small.sampling.temperature, small.sampling.max_tokens) == (0.5, 7)
    assert (large.sampling.temperature, large.sampling.max_tokens) == (1.0, RESPONSE)
    assert (small.reward, large.reward) == (0, 1)
    [held_out] = source.eval_sets()
    assert held_out.problems[0].reward == 1  # the run's


def test_a_held_out_set_is_sampled_and_scored_its_own_way(model: Path, tmp_path: Path) -> None:
    path = write_problems(tmp_path / "held.jsonl", 3)
    sets = [
        {"name": "own", "path": path, "limit": 2, "max_tokens": 9, "reward": {"function": "gsm8k"}, "suffix": "!",
         "sampling": {"samples": 32, "temperature": 0.6}},
        {"name": "plain", "path": path},
    ]  # fmt: skip
    own, plain = PromptSource(config(tmp_path, model, evaluation={"sets": sets})).eval_sets()
    first, plains = own.problems[0], plain.problems[0]
    assert (own.samples, first.sampling.temperature, first.sampling.max_tokens, own.greedy.max_tokens) == (
        32,
        0.6,
        9,
        9,
    )
    assert (plain.samples, plains.sampling.temperature, plains.sampling.max_tokens) == (1, 1.0, RESPONSE)
    assert (len(own.problems), len(plain.problems)) == (2, 3) and (first.reward, plains.reward) == (1, 0)
    assert first.reward_input("r", [1], "stop").prompt.endswith("!")
    assert len(first.ids) > len(plains.ids)


def test_a_mistake_in_a_held_out_set_is_found_at_the_start_and_names_it(model: Path, tmp_path: Path) -> None:
    path = write_problems(tmp_path / "held.jsonl", 3)
    sets = [{"name": "good", "path": path}, {"name": "bad", "path": path, "prompt_field": "questoin"}]
    with pytest.raises(ValueError, match=r"evaluation\.sets\.1 \(bad\): .*questoin"):
        PromptSource(config(tmp_path, model, evaluation={"sets": sets}))


def test_a_variable_that_the_chat_template_lacks_names_the_set(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.sets\.0 \(small\): chat_template_kwargs: enable_thinkng"):
        PromptSource(several(tmp_path, model, {"chat_template_kwargs": {"enable_thinkng": False}}))


def test_a_resume_draws_the_same_and_refuses_other_data(model: Path, tmp_path: Path) -> None:
    first = PromptSource(several(tmp_path, model))
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptSource(several(tmp_path, model))
    second.load_state_dict(state, 10, 2)
    assert [second.draw(group) for group in range(40)] == [first.draw(group) for group in range(40)]
    one_file = PromptSource(config(tmp_path, model))
    with pytest.raises(ValueError, match=r"the saved run has data\.sets, but this run has data\.path"):
        one_file.load_state_dict(state, 10, 2)
    with pytest.raises(ValueError, match=r"the saved run has data\.path, but this run has data\.sets"):
        second.load_state_dict(one_file.state_dict(), 10, 2)
    write_problems(tmp_path / "shorter.jsonl", 5)
    with pytest.raises(ValueError, match=r"data\.sets\.0 \(small\): the saved prompt cursor has n = 6"):
        PromptSource(several(tmp_path, model, {"path": tmp_path / "shorter.jsonl"})).load_state_dict(state, 10, 2)
    with pytest.raises(ValueError, match="draws from data sets with names"):
        PromptSource(several(tmp_path, model, {"name": "other"})).load_state_dict(state, 10, 2)


def test_weights_that_were_changed_between_two_starts_hold_for_the_groups_to_come(model: Path, tmp_path: Path) -> None:
    first = PromptSource(several(tmp_path, model))
    changed = PromptSource(several(tmp_path, model, {"weight": 1e9}))
    changed.load_state_dict(json.loads(json.dumps(first.state_dict())), 10, 2)
    assert [changed.draw(group) for group in range(10)] == [first.draw(group) for group in range(10)]
    assert {changed.dataset(group) for group in range(10, 60)} == {"small"}


SEEN: list[TrainingProgress] = []


def by_reward(progress: TrainingProgress, seconds: float = 0.0) -> dict[str, float]:
    """The small set alone until a group of it has a reward."""
    SEEN.append(progress)
    time.sleep(seconds if progress.steps else 0.0)
    return {"small": 1.0, "large": float(any(progress.sets["small"].rewards))}


def with_curriculum(directory: Path, model: Path, **kwargs: Any) -> PromptSource:
    SEEN.clear()
    curriculum = {"function": f"{__name__}:by_reward", "kwargs": kwargs}
    return PromptSource(
        several(directory, model, data={"curriculum": curriculum}, timeouts={"rpc_s": 0.01 if kwargs else 0.4})
    )


def test_a_curriculum_weighs_the_groups_to_come_and_a_resume_goes_on_with_it(model: Path, tmp_path: Path) -> None:
    source = with_curriculum(tmp_path, model)
    assert {source.dataset(group) for group in range(40)} == {"small"}
    for group in range(8):
        source.finish(group, [float(group == 5)] * 2)
    asyncio.run(source.commit(range(4), 1, lambda: 8, lambda: 4))
    assert {source.draw(group).dataset for group in range(40)} == {"small"}
    asyncio.run(source.commit(range(4, 8), 2, lambda: 12, lambda: 0))
    assert [(each.steps, each.next_group) for each in SEEN] == [(0, 0), (1, 8), (2, 12)]
    assert SEEN[-1].sets["small"].groups == 8 and SEEN[-1].sets["small"].rewards == (0.0,) * 5 + (1.0, 0.0, 0.0)
    assert {source.dataset(group) for group in range(12)} == {"small"}
    assert Counter(source.draw(group).dataset for group in range(12, 32)) == {"small": 10, "large": 10}
    resumed = with_curriculum(tmp_path, model)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())), 12, 3)
    assert [resumed.draw(group) for group in range(32)] == [source.draw(group) for group in range(32)]
    for each in (source, resumed):
        each.finish(8, [0.5])
        asyncio.run(each.commit([8], 3, lambda: 16, lambda: 13))
    assert resumed.state_dict() == source.state_dict()
    assert [span["start"] for span in source.state_dict()["mixture"]["spans"]] == [12]  # the first open group is 13
    source.reset()  # a run that begins again has seen nothing
    assert {source.dataset(group) for group in range(40)} == {"small"}
    assert source.state_dict() == with_curriculum(tmp_path, model).state_dict()


def test_a_curriculum_that_takes_too_long_is_named(model: Path, tmp_path: Path) -> None:
    source = with_curriculum(tmp_path, model, seconds=1.0)
    source.finish(0, [1.0])
    with pytest.raises(RolloutError, match=r"commit of step 1 waited 0 s for data.curriculum .*by_reward"):
        asyncio.run(source.commit([0], 1, lambda: 4, lambda: 1))


def test_prompts_of_agents_show_the_tools_of_their_set(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.support.models.chat_templates import CHATML_TOOLS

    model = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML_TOOLS.replace("{{ tools | tojson }}", "{{ tools[0]['function']['name'] }}")
    tokenizer.save_pretrained(model)
    planned = config(tmp_path, model, agent={"loop": "tool_agent", "tool_format": "hermes"})
    tools = [
        {
            "kind": "http",
            "name": "compute",
            "kwargs": {"url": "http://127.0.0.1:1/", "description": "x", "parameters": {"type": "object"}},
        }
    ]
    agents = planned.model_validate({**planned.model_dump(mode="json"), "tools": tools})
    plain, source = PromptSource(planned), PromptSource(agents)
    shown = "<|im_start|>system\ncompute<|im_end|>"
    for group in range(4):
        text = source.tokenizer.decode(source.draw(group).ids)
        assert text.startswith(shown) and text.endswith(plain.tokenizer.decode(plain.draw(group).ids))
    [wanted] = source.eval_sets()
    assert all(source.tokenizer.decode(each.ids).startswith(shown) for each in wanted.problems)
    assert list(source.eval_toolboxes[wanted.name].tools) == list(source.toolboxes[""].tools) == ["compute"]
    unseen = make_tiny_model(tmp_path / "other")
    hidden = agents.model_copy(update={"model": agents.model.model_copy(update={"path": unseen})})
    with pytest.raises(ValueError, match="does not show tools to the model"):
        PromptSource(hidden)
    asyncio.run(source.close_tools())


def shown(directory: Path, model: Path, rows: int, **fields: Any) -> Config:
    """A set of demonstrations that is used in the first two steps, and one of problems after them."""
    file = directory / "shown.jsonl"
    file.write_text("".join(json.dumps({"problem": f"{n}+1=?", "reply": f"{n + 1}"}) + "\n" for n in range(rows)))
    asked = directory / "asked.jsonl"
    write_problems(asked, 40, 100)
    own = {"name": "shown", "path": file, "demonstration_field": "reply", "until_step": 2, **fields}
    sets = [own, {"name": "asked", "path": asked, "from_step": 2}]
    return config(directory, model, data={"path": None, "sets": sets, "max_prompt_tokens": None})


def test_each_sample_of_a_group_of_demonstrations_has_one_of_its_own(model: Path, tmp_path: Path) -> None:
    """Every demonstration comes once before one comes again, and a resume goes on with the next ones."""
    made = shown(tmp_path, model, rows=2 * SAMPLES + 1)
    source, groups = PromptSource(made), made.batch.groups
    drawn = [source.draw(group) for group in range(2 * groups)]
    assert {each.dataset for each in drawn} == {"shown"}
    assert all(len(each.demonstrations) == made.batch.samples_per_group for each in drawn)
    assert all(each.ids == each.demonstrations[0].prompt_ids for each in drawn)
    replies = [tuple(one.response_ids) for each in drawn for one in each.demonstrations]
    rows = 2 * SAMPLES + 1
    assert len(set(replies[:rows])) == rows
    later = [source.draw(group) for group in range(2 * groups, 3 * groups)]
    assert {each.dataset for each in later} == {"asked"} and not any(each.demonstrations for each in later)
    assert source.reference(0) == "" and source.reference(2 * groups) == later[0].answer
    resumed = PromptSource(made)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())), groups, 1)
    assert [resumed.draw(group) for group in range(groups, 3 * groups)] == [*drawn[groups:], *later]


@pytest.mark.parametrize("unsettled", [0, 1])
@pytest.mark.parametrize("factor", [1, 2])
def test_the_steps_of_a_set_are_those_of_the_run_after_a_resume_with_another_batch_size(
    model: Path, tmp_path: Path, factor: int, unsettled: int
) -> None:
    """The set ends after step 2, also if the first step had other groups. A group that was started is trained first."""
    made = shown(tmp_path, model, rows=8)
    before, groups = made.batch.groups, factor * made.batch.groups
    source = PromptSource(made)
    for group in range(before + unsettled):
        source.draw(group)
    larger = made.model_copy(update={"batch": made.batch.model_copy(update={"groups": groups})})
    resumed = PromptSource(larger)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())), before + unsettled, 1, unsettled)
    names = [resumed.draw(group).dataset for group in range(before, before + 2 * groups)]
    assert names == ["shown"] * groups + ["asked"] * groups


def test_the_steps_of_a_set_that_is_finished_do_not_come_again(model: Path, tmp_path: Path) -> None:
    """Nor does the set end early in smaller batches."""
    made = shown(tmp_path, model, rows=8)
    source, before = PromptSource(made), made.batch.groups
    for group in range(3 * before):
        source.draw(group)
    for groups in (10 * before, 1):
        other = made.model_copy(update={"batch": made.batch.model_copy(update={"groups": groups})})
        resumed = PromptSource(other)
        resumed.load_state_dict(json.loads(json.dumps(source.state_dict())), 3 * before, 3)
        assert {resumed.draw(group).dataset for group in range(3 * before, 6 * before)} == {"asked"}


@pytest.mark.parametrize("key", ["refill", "max_uses"])
def test_steps_of_sets_are_refused_where_groups_do_not_tell_the_step(model: Path, tmp_path: Path, key: str) -> None:
    made = shown(tmp_path, model, rows=8)
    admission = {"refill": True} if key == "refill" else {"mode": "async", "max_staleness": 7, "max_uses": 2}
    other = made.model_copy(update={"admission": AdmissionConfig(**admission)})
    with pytest.raises(ConfigError) as refused:
        check(other, device="cpu")
    assert any(f"with admission.{key} a step starts more or fewer" in each for each in refused.value.problems)


def test_sets_that_are_scheduled_wrongly_are_refused(model: Path, tmp_path: Path) -> None:
    for fields, reported in (
        ({"until_step": 1}, "data.sets: no set has prompts for step 1; change from_step or until_step of one"),
        ({"from_step": 2, "until_step": 2}, "data.sets.0.until_step: 2 is not after from_step=2, so the set would nev"),
    ):
        with pytest.raises(ConfigError) as refused:
            check(shown(tmp_path, model, 8, **fields), device="cpu")
        assert any(problem.startswith(reported) for problem in refused.value.problems), refused.value.problems


def test_demonstrations_that_would_change_nothing_are_refused(model: Path, tmp_path: Path) -> None:
    made = shown(tmp_path, model, 8)
    ce = made.algorithm.model_copy(update={"ce": made.algorithm.ce.model_copy(update={"coef": 0.0})})
    with pytest.raises(ConfigError, match=r"algorithm.ce.coef: 0, so the demonstrations of data.sets.0 would change"):
        check(made.model_copy(update={"algorithm": ce}), device="cpu")


@pytest.mark.parametrize("opened", [True, False])
def test_a_reward_sees_whether_the_template_has_opened_the_reasoning(tmp_path: Path, opened: bool) -> None:
    model = make_tiny_model(tmp_path / "thinking")
    template = model / "chat_template.jinja"
    given = template.read_text()
    assert "add_generation_prompt" in given
    template.write_text(given + ("{% if add_generation_prompt %}<think>\n{% endif %}" if opened else ""))
    held = {"sets": [{"name": "held", "path": str(write_problems(tmp_path / "held.jsonl", 4))}]}
    source = PromptSource(config(tmp_path, model, evaluation=held))
    for drawn in (source.draw(0), source.eval_sets()[0].problems[0]):
        seen = drawn.reward_input("7", [1], "stop").prompt_end
        assert seen.endswith("<think>\n") == opened and seen in source.tokenizer.decode(drawn.ids)
