import re
from pathlib import Path
from typing import Any, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from megarl.common.errors import ConfigError
from megarl.config.loading.load import apply_overrides, config_from_tree, load_config, parse_yaml, section_of, walk_keys
from megarl.config.loading.removed_keys import REMOVED, VERL, advice_on, without_removed
from megarl.config.schema import Config
from tests.support.checkout import ROOT
from tests.support.trainer.configs import tree


def problems_of(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_tree(tree)
    return caught.value.problems


def tree_with(key: str) -> dict[str, Any]:
    """A config in which only `key` is set; sections of lists are lists of one."""
    whole: dict[str, Any] = {}
    place = whole
    schema: type[BaseModel] = Config
    *parents, leaf = key.split(".")
    for name in parents:
        field = schema.model_fields[name]
        inner: dict[str, Any] = {}
        place[name] = [inner] if get_origin(field.annotation) is list else inner
        place, schema = inner, section_of(field.annotation) or BaseModel
    place[leaf] = None
    return whole


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_what_to_do_instead(key: str) -> None:
    advice = advice_on(key, {})
    assert advice
    reported = [re.sub(r"\.0(?=\.)", "", problem) for problem in problems_of(tree_with(key))]
    assert f"{key}: no such key; {advice}" in reported


def test_a_removed_key_is_none_and_the_changelog_has_it() -> None:
    known = set(walk_keys())
    assert not REMOVED.keys() & known
    assert not VERL.keys() & {key.rpartition(".")[2] for key in known}
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not [key for key in (*REMOVED, *VERL) if f"`{key}`" not in changelog]


def test_a_config_that_an_earlier_version_has_stored_is_read_without_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    stored = tree("model") | {"monitor": {"ess": {"threshold": 0.3}, "min_tokens": 7}, "ray": {"num_cpus": 3}}
    stored["door"] = {"enabled": True, "request_timeout_s": 1800.0}
    stored["algorithm"] = {"clip_low": 0.1, "clip_high": None, "loss_options": {"clip_dual": 3.0}}
    stored["admission"] = {"trigger_parameter_sync_step": None, "staleness_threshold": None}
    path.write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError, match=r"ray\.num_cpus: no such key"):
        load_config(path)
    read = load_config(path, stored=True)
    assert read.monitor.min_tokens == 7 and read.gateway.enabled
    assert read.algorithm.loss_options == {"clip_low": 0.1, "clip_dual": 3.0}
    stored["admission"]["staleness_threshold"] = 0.5
    path.write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError, match=r"write admission\.max_staleness"):
        load_config(path, stored=True)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("admission.trigger_parameter_sync_step=4", {"admission.sync_interval: 4"}),
        (
            "admission.require_batches=4 admission.trigger_parameter_sync_step=3",
            {"admission.sync_interval: 12", "trainer.mini_batches: 4"},
        ),
        (
            "admission.trigger_parameter_sync_step=4 admission.staleness_threshold=0.5",
            {"admission.sync_interval: 4", "admission.max_staleness: 5"},
        ),
        ("admission.staleness_threshold=0", {"admission.max_staleness: 3"}),
        ("admission.staleness_threshold=0.5 trainer.mini_batches=3", {"admission.max_staleness: 8"}),
        ("admission.staleness_threshold=0.1 admission.sync_interval=10", {"admission.max_staleness: 10"}),
        ("admission.require_batches=4", {"trainer.mini_batches: 4"}),
        ("algorithm.use_rollout_log_probs=true", {"algorithm.old_logprobs: rollout"}),
        ("admission.use_rollout_log_probs=false", {"algorithm.old_logprobs: trainer"}),
        ("algorithm.rollout_is=token", {"algorithm.correction: {kind: token_tis}"}),
        ("algorithm.correction.rollout_is=", {"algorithm.correction: {kind: none}"}),
        ("algorithm.correction.rollout_is_threshold=3", {"algorithm.correction: {cap: 3.0}"}),
        (
            "algorithm.rollout_is=sequence algorithm.rollout_is_threshold=4.0",
            {"algorithm.correction: {kind: sequence_tis, cap: 4.0}"},
        ),
        (
            "algorithm.rollout_is=token algorithm.rollout_is_threshold='0.5_5.0'",
            {"algorithm.correction: {kind: icepop, low: 0.5, high: 5.0}"},
        ),
        (
            "algorithm.rollout_is=sequence algorithm.rollout_is_threshold='0.25_4'",
            {"algorithm.correction: {kind: sequence_mis, low: 0.25, high: 4.0}"},
        ),
        (
            "algorithm.rollout_rs=token_k1,seq_mean_k3 algorithm.rollout_rs_threshold='0.5_2.0,0.01'",
            {
                "algorithm.correction: {masks: [{kind: token_k1, low: 0.5, high: 2.0}, {kind: seq_mean_k3, "
                "high: 0.01}], denominator: kept}"
            },
        ),
        (
            "algorithm.rollout_rs=seq_max_k2,seq_mean_k3 algorithm.rollout_rs_threshold=0.1",
            {
                "algorithm.correction: {masks: [{kind: seq_max_k2, high: 0.1}, {kind: seq_mean_k3, high: 0.1}], "
                "denominator: kept}"
            },
        ),
        # Somebody who looks for the key in another section.
        ("rollout.require_batches=4 admission.require_batches=4", {"trainer.mini_batches: 4"}),
    ],
)  # fmt: skip
def test_a_name_of_verl_is_refused_with_the_key_and_the_value_to_write(given: str, written: set[str]) -> None:
    reported = problems_of(apply_overrides(tree("model"), given.split()))
    found = {
        match[1] for each in reported if (match := re.search(r"no such key; write ([^;]+?)(;.*|, with .*)?$", each))
    }
    assert found == written
    config_from_tree(
        apply_overrides(tree("model"), [f"{key}={value}" for key, _, value in (each.partition(": ") for each in found)])
    )


@given(interval=st.sampled_from([1, 5, 25, 50, 100, 125, 200]), thousandths=st.integers(0, 2000))
@settings(max_examples=300)
def test_verls_quota_is_the_decimal_that_the_config_says(interval: int, thousandths: int) -> None:
    """The bound is k - 1 + ceil(s * k), computed in whole numbers; s * k is often a whole number."""
    for digits in (thousandths, thousandths - thousandths % (1000 // interval)):
        admission = {"sync_interval": interval, "staleness_threshold": digits / 1000}
        bound = interval - 1 - (-digits * interval // 1000)
        assert f"max_staleness: {bound}," in (advice_on("staleness_threshold", {"admission": admission}) or "")


@pytest.mark.parametrize(
    "given",
    ["trigger_parameter_sync_step=much", "staleness_threshold=[1]", "rollout_is=7", "rollout_is_threshold=a_b",
     "rollout_rs=token_k1,token_k2", "rollout_rs_threshold=1_2_3_x"],
)  # fmt: skip
def test_a_value_that_verl_could_not_have_hides_no_message(given: str) -> None:
    [reported] = problems_of(apply_overrides(tree("model"), [f"algorithm.{given}"]))
    key = f"algorithm.{given.partition('=')[0]}"
    assert reported == f"{key}: no such key; docs/coming-from.md has a table of verl's names"


def test_sections_that_are_none_hide_no_message() -> None:
    whole = parse_yaml("{admission: [1], algorithm: 7, trainer: {require_batches: 2}}")
    assert isinstance(whole, dict)
    assert "trainer.require_batches: no such key; write trainer.mini_batches: null" in problems_of(whole)


@pytest.mark.parametrize(
    ("dtype", "precision", "warned"),
    [("float32", "bf16", True), ("bfloat16", "bf16", False), ("auto", "fp32", False), ("float32", None, True)],
)
def test_a_stored_type_of_engines_that_is_dropped_is_reported(
    caplog: pytest.LogCaptureFixture, dtype: str, precision: str | None, warned: bool
) -> None:
    stored = {"rollout": {"dtype": dtype}, "trainer": {"precision": precision} if precision else {}}
    assert without_removed(stored)["rollout"] == {}
    assert ("rollout.dtype" in caplog.text) == warned
