"""The correction that a config asks for, and its cost in log-prob passes."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.correction.config import MaskConfig
from megarl.common.errors import ConfigError
from megarl.config.derived.logprob_passes import (
    correction_of,
    correction_problems,
    interpolates_proximal,
    logprob_passes,
    recomputes_old_logprobs,
    rejection_of,
)
from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS
from tests.support.trainer.configs import config

AHEAD: dict[str, Any] = {"admission": {"mode": "async", "sync_interval": 4, "max_staleness": 7}}
TIS = CorrectionSpec("token_tis", 2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"trainer__mini_batches": 4}, None),  # max_staleness is 3 within the step, which the ratio corrects
        (AHEAD, TIS),
        ({"admission": {"mode": "one_step_off"}}, TIS),
        ({"admission": {"mode": "stream"}}, TIS),
        ({"admission": {"mode": "stream", "sync_interval": 1}}, None),  # the same as sync
        ({"admission": {"mode": "async", "sync_interval": 4, "max_staleness": 3}, "trainer__mini_batches": 4}, None),
        ({**AHEAD, "algorithm__correction__kind": "none"}, None),
        ({**AHEAD, "algorithm__correction__cap": 5.0}, CorrectionSpec("token_tis", 5.0)),
        ({"algorithm__correction__kind": "token_tis"}, TIS),
    ],
)
def test_auto_corrects_where_generation_runs_ahead(changes: dict[str, Any], expected: CorrectionSpec | None) -> None:
    assert correction_of(config("model", **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, False),
        ({"trainer__mini_batches": 4}, False),
        ({"algorithm__old_logprobs": "trainer"}, True),
        (AHEAD, False),  # the one update has them in its own forward pass
        ({**AHEAD, "trainer__mini_batches": 2}, True),
        ({**AHEAD, "algorithm__old_logprobs": "trainer"}, True),
        ({**AHEAD, "trainer__mini_batches": 2, "algorithm__correction__kind": "none"}, False),
    ],
)
def test_several_updates_need_the_log_probs_of_the_first(changes: dict[str, Any], recomputed: bool) -> None:
    assert recomputes_old_logprobs(config("model", **changes)) is recomputed


MASKS = [{"kind": "geometric", "low": 0.9, "high": 1.1}, {"kind": "token_k2", "high": 0.5}]
KEPT = {"algorithm__correction__masks": MASKS, "algorithm__correction__denominator": "kept"}


def test_masks_are_a_correction_without_a_weight() -> None:
    masks = (MaskConfig(kind="geometric", low=0.9, high=1.1), MaskConfig(kind="token_k2", high=0.5))
    sync = config("model", algorithm__correction__masks=MASKS)
    assert correction_of(sync) == CorrectionSpec("none", masks=masks) and rejection_of(sync) is None
    assert correction_of(config("model", **AHEAD, algorithm__correction__masks=MASKS)) == replace(TIS, masks=masks)


def test_masks_that_do_not_count_act_before_the_updates_and_need_a_pass() -> None:
    masks = (MaskConfig(kind="geometric", low=0.9, high=1.1), MaskConfig(kind="token_k2", high=0.5))
    kept = config("model", **AHEAD, **KEPT)
    assert correction_of(kept) == TIS and rejection_of(kept) == replace(TIS, masks=masks)
    assert logprob_passes(kept) == [OLD_LOGPROBS]
    only = config("model", **KEPT)
    assert correction_of(only) == CorrectionSpec("none") and logprob_passes(only) == [OLD_LOGPROBS]
    assert logprob_passes(config("model", algorithm__correction__masks=MASKS)) == []


def test_an_interpolated_proximal_policy_needs_no_pass() -> None:
    changes = {**AHEAD, "trainer__mini_batches": 2}
    assert recomputes_old_logprobs(config("model", **changes))
    interpolated = config("model", **changes, algorithm__correction__proximal="loglinear")
    assert not recomputes_old_logprobs(interpolated) and interpolates_proximal(correction_of(interpolated))
    assert not interpolates_proximal(correction_of(config("model", **changes)))


CORRECTION = "algorithm__correction"


@pytest.mark.parametrize(
    ("correction", "reported"),
    [
        ({"kind": "icepop", "cap": 3.0}, "correction.cap: 3.0 has no effect with kind: icepop; remove it, or use"),
        (
            {"kind": "token_tis", "low": 0.1},
            "correction.low: 0.1 has no effect with kind: token_tis; remove",
        ),
        ({"high": 3.0}, "correction.high: 3.0 has no effect with kind: auto; remove it, or use icepop or"),
        ({"masks": [{"kind": "token_k2", "low": 0.1, "high": 1.0}]}, "masks.0.low: token_k2 is never negative"),
        ({"masks": [{"kind": "geometric", "high": 0.5}]}, "masks.0: [2, 0.5] excludes tokens on which both policies"),
        ({"masks": [{"kind": "token", "low": 1.1, "high": 2.0}]}, "masks.0: [1.1, 2] excludes tokens on which both"),
        ({"masks": [{"kind": "token", "high": 2.0}] * 2}, "correction.masks.1: a second mask token; keep the one with"),
        ({"denominator": "kept"}, "correction.denominator: kept applies to masked tokens, and there are no masks"),
        (
            {"kind": "sequence_tis", "denominator": "kept", "masks": [{"kind": "token", "high": 2.0}]},
            "correction.denominator: kept removes tokens (token) from the sequences whose product is the weight",
        ),
        (
            {
                "kind": "token_tis",
                "denominator": "kept",
                "masks": [{"kind": "token", "high": 2.0}],
                "proximal": "loglinear",
            },
            "correction.proximal: loglinear masks tokens during the update",
        ),
        ({"proximal": "loglinear"}, "correction.proximal: loglinear is for a correction, and there is none"),
    ],
)
def test_what_cannot_be_combined_is_one_message(correction: dict[str, Any], reported: str) -> None:
    [problem] = correction_problems(config("model", **{CORRECTION: correction}))
    assert problem.startswith("algorithm.") and reported in problem


def test_an_interpolation_alongside_the_pass_that_it_saves_is_refused() -> None:
    both = config("model", **AHEAD, algorithm__old_logprobs="trainer", algorithm__correction__proximal="loglinear")
    [problem] = correction_problems(both)
    assert "saves the log-prob pass that algorithm.old_logprobs: trainer asks for" in problem


@pytest.mark.parametrize(
    "correction",
    [
        {},
        {"cap": 3.0},
        {"kind": "none", "cap": 3.0, "low": 0.1},
        {"kind": "icepop", "low": 0.4, "high": 3.0, "masks": MASKS},
        {"kind": "sequence_tis", "cap": 4.0, "masks": [{"kind": "sequence", "high": 5.0}], "denominator": "kept"},
        {"kind": "token_tis", "proximal": "loglinear", "masks": [{"kind": "seq_max_k3", "high": 1.0}]},
    ],
)
def test_what_can_be_combined_is_not_refused(correction: dict[str, Any]) -> None:
    assert not list(correction_problems(config("model", **{CORRECTION: correction})))


def test_a_cap_below_one_is_refused() -> None:
    """It would weigh tokens on which the policies agree."""
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.cap"):
        config("model", algorithm__correction__cap=0.5)


TRAINER, KL = {"algorithm__old_logprobs": "trainer"}, {"algorithm__kl__coef": 0.1}


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, []),
        (TRAINER, [OLD_LOGPROBS]),
        (KL, [REFERENCE_LOGPROBS]),
        (TRAINER | KL, [OLD_LOGPROBS, REFERENCE_LOGPROBS]),
        ({**AHEAD, "trainer__mini_batches": 2}, [OLD_LOGPROBS]),
    ],
)
def test_a_step_makes_the_passes_that_its_loss_needs(changes: dict[str, Any], passes: list[str]) -> None:
    assert logprob_passes(config("model", **changes)) == passes
