"""The correction that a config asks for, and its cost in log-prob passes."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.algorithms.correction import CorrectionSpec
from megarl.common.errors import ConfigError
from megarl.config.old_logprobs import (
    computes_logprobs_early,
    correction_of,
    logprob_passes,
    recomputes_old_logprobs,
)
from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS
from tests.support.configs import config

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
def test_the_passes_of_a_step_are_made_early_unless_bits_count(changes: dict[str, Any], passes: list[str]) -> None:
    assert logprob_passes(config("model", **changes)) == passes
    assert computes_logprobs_early(config("model", **changes)) is bool(passes)
    for exact in ("trainer__idle_logprobs=", "run__deterministic", "telemetry__dump_batches"):
        setting = {exact.rstrip("="): not exact.endswith("=")}
        assert not computes_logprobs_early(config("model", **changes, **setting))
