"""Secrets reach the code that uses them, and neither files, messages nor command lines."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.nodes.commands import exports
from megarl.common.options import Section
from megarl.config.checks.secrets import referenced_variables, secret_problems
from megarl.config.loading.load import to_yaml
from megarl.config.schema import Config
from megarl.rewards.registry import resolve
from megarl.rewards.types import RewardInput
from megarl.rollout.engine.engine_args import engine_args
from tests.support.checkout import ROOT
from tests.support.rewards.reward_pool import make_reward_pool, score_all
from tests.support.runs.run import tiny_config

SECRET = "s3cr3t value"
REFERENCE = {"env": "JUDGE_KEY"}


def config_with(tmp_path: Path, **changes: dict[str, Any]) -> Config:
    raw = tiny_config(tmp_path)
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values}
    return Config.model_validate_json(json.dumps(raw, default=str))


def test_a_reward_process_gets_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    pool = make_reward_pool(
        "tests.support.rewards.reward_functions:is_the_key", {"key": REFERENCE, "more": [REFERENCE]}
    )
    try:
        (outcome,) = score_all(pool, [RewardInput("p", SECRET, [1], "stop", "a", {})])
    finally:
        pool.close()
    assert outcome.error is None and outcome.score == 1.0
    assert SECRET not in repr(pool.functions)


def test_a_reward_process_without_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Ray cluster of the user's own the variable may be missing where the process runs."""
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    pool = make_reward_pool("tests.support.rewards.reward_functions:is_the_key", {"key": REFERENCE, "more": []})
    try:
        with pytest.raises(Exception, match=r"reward\.kwargs\.key: the environment variable JUDGE_KEY is not set"):
            score_all(pool, [RewardInput("p", "r", [1], "stop", "a", {})])
            raise AssertionError("scored")
    finally:
        pool.close()


def test_copies_of_the_config_hold_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    config = config_with(
        tmp_path, reward={"kwargs": {"api_key": REFERENCE}}, rollout={"engine_kwargs": {"hf_token": REFERENCE}}
    )
    for copy in (to_yaml(config), config.model_dump_json(), repr(config)):
        assert SECRET not in copy and "JUDGE_KEY" in copy
    assert engine_args(config, cuda=False, max_model_len=64)["hf_token"] == SECRET
    literal = config_with(tmp_path, reward={"kwargs": {"api_key": SECRET}})
    for copy in (to_yaml(literal), literal.model_dump_json(), repr(literal)):
        assert SECRET in copy, "a value that is written down would be in every copy"


def test_a_literal_secret_is_reported_wherever_values_are_passed_on(tmp_path: Path) -> None:
    values = {"judges": [{"api_key": SECRET}]}
    one_set = {"name": "a", "path": str(tmp_path / "a.jsonl"), "reward": {"kwargs": values}}
    config = config_with(
        tmp_path,
        reward={"kwargs": values},
        data={"sets": [one_set], "curriculum": {"function": "m:f", "kwargs": values}},
        evaluation={"sets": [one_set]},
        agent={"kwargs": values},
        rollout={"engine_kwargs": values},
    )
    teacher = {"name": "big", "path": str(tmp_path), "engine_kwargs": values}
    tool = {"kind": "m:f", "kwargs": values}
    more = {"teachers": [teacher], "tools": [tool]}
    config = Config.model_validate_json(json.dumps(json.loads(config.model_dump_json()) | more))
    places = ("reward.kwargs", "agent.kwargs", "tools.0.kwargs", "data.sets.0.reward.kwargs",
              "evaluation.sets.0.reward.kwargs", "data.curriculum.kwargs", "rollout.engine_kwargs",
              "teachers.0.engine_kwargs")  # fmt: skip
    reported = [problem.partition(":")[0] for problem in secret_problems(config, here=True)]
    assert reported == [f"{place}.judges.0.api_key" for place in places]


def test_every_place_where_values_are_passed_on_is_known_here() -> None:
    """A new one has to be looked at by `secret_problems`, unless what it is passed to knows no secrets."""
    looked_at = {"RewardConfig.kwargs", "SetRewardConfig.kwargs", "AgentConfig.kwargs", "ToolConfig.kwargs",
                 "CurriculumConfig.kwargs", "RolloutConfig.engine_kwargs", "TeacherConfig.engine_kwargs"}  # fmt: skip
    without = {"MegatronConfig.transformer", "MegatronConfig.optimizer", "MegatronConfig.ddp",
               "AlgorithmConfig.advantage_options", "AlgorithmConfig.loss_options",
               "DataConfig.chat_template_kwargs", "TrainSetConfig.chat_template_kwargs",
               "EvalSetConfig.chat_template_kwargs"}  # fmt: skip
    assert places_below(Config, set()) == looked_at | without


def places_below(section: type[Section], seen: set[type[Section]]) -> set[str]:
    """Return the fields below a section of the config that hold any values at all, as Class.field."""
    seen.add(section)
    found = set()
    for name, field in section.model_fields.items():
        for kind in kinds_in(field.annotation):
            if kind is Any:
                found.add(f"{section.__name__}.{name}")
            elif isinstance(kind, type) and issubclass(kind, Section) and kind not in seen:
                found |= places_below(kind, seen)
    return found


def kinds_in(annotation: Any) -> list[Any]:
    """Return the types that an annotation is made of."""
    return [kind for inner in get_args(annotation) for kind in kinds_in(inner)] or [annotation]


def test_missing_variables_and_literal_secrets_are_reported_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = config_with(tmp_path, reward={"kwargs": {"url": REFERENCE, "api_key": SECRET}})
    one, two = secret_problems(config, here=True)
    assert one == "reward.kwargs.url: the environment variable JUDGE_KEY is not set; export it before the start"
    assert two.startswith("reward.kwargs.api_key: its name says that it is a secret") and SECRET not in two
    assert list(secret_problems(config, here=False)) == [two]
    (tmp_path / "env.yaml").write_text("env_vars: {JUDGE_KEY: x}\n")
    config = config_with(
        tmp_path, reward={"kwargs": {"url": REFERENCE}}, launch={"runtime_env": str(tmp_path / "env.yaml")}
    )
    assert not list(secret_problems(config, here=True))
    (tmp_path / "env.yaml").write_bytes("env_vars: {JUDGE_KEY: é}".encode("latin-1"))
    assert "JUDGE_KEY is not set" in "".join(secret_problems(config, here=True)), "the launch names the file"


def test_messages_do_not_show_values() -> None:
    with pytest.raises(ValueError, match="cannot be made with") as caught:
        resolve("builtins:object", {"key": SECRET})
    assert SECRET not in str(caught.value)


@given(
    values=st.dictionaries(
        st.sampled_from(["RAY_AUTH_TOKEN", "VLLM_API_KEY", "NCCL_X", "MLFLOW_TRACKING_TOKEN"]),
        st.text(st.characters(codec="ascii", exclude_characters="\0\r")),
    )
)
def test_a_shell_reads_the_variables_that_are_passed_on(
    values: dict[str, str],
) -> None:
    text = exports((), {**values, "OTHER": "not passed"})
    command = 'eval "$(cat)" && env -0'
    done = subprocess.run(
        ["sh", "-c", command], input=text.encode(), env={"PATH": os.environ["PATH"]}, capture_output=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if "=" in line)
    assert {name: found[name] for name in values} == values and "OTHER" not in found


def test_variables_that_the_config_refers_to_are_passed_on(tmp_path: Path) -> None:
    config = config_with(tmp_path, reward={"kwargs": {"url": REFERENCE}})
    assert exports(referenced_variables(config), {"JUDGE_KEY": "a b", "OTHER": "x"}) == "export JUDGE_KEY='a b'\n"


def test_no_secret_is_on_a_command_line_of_ssh(tmp_path: Path) -> None:
    """The stand-in of ssh records its arguments, and that of Python what its environment holds."""
    launch = tmp_path / "run/launch/1"
    launch.mkdir(parents=True)
    python = f"""#!/bin/sh
case "$*" in
  *prepare*) echo {launch}/launch.json;;
  *environment*) echo "export RAY_AUTH_TOKEN='$RAY_AUTH_TOKEN'";;
  *launcher*) echo "$RAY_AUTH_TOKEN" >>{tmp_path}/agents;;
  *status*) echo finished;;
esac
"""
    rsh = f'#!/bin/sh\necho "$@" >>{tmp_path}/arguments\nexec env -i PATH="$PATH" sh -c "$2"\n'
    for name, text in (("python", python), ("rsh", rsh)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PYTHON": str(tmp_path / "python"),
        "MEGARL_RSH": str(tmp_path / "rsh"),
        "RAY_AUTH_TOKEN": SECRET,
    }
    subprocess.run(
        ["bash", str(ROOT / "launch/multinode.sh"), "a,b", "my.yaml"],
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    assert (tmp_path / "agents").read_text() == f"{SECRET}\n" * 2
    arguments = (tmp_path / "arguments").read_text()
    assert "megarl.cluster.nodes.launcher" in arguments and SECRET not in arguments
    # As one would write it first: the variable before the command.
    command = f"RAY_AUTH_TOKEN='{SECRET}' exec {tmp_path}/python -m megarl.cluster.nodes.launcher"
    subprocess.run([str(tmp_path / "rsh"), "a", command], env=environment, cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "agents").read_text() == f"{SECRET}\n" * 3
    assert SECRET in (tmp_path / "arguments").read_text(), "whoever lists the processes would see it"
