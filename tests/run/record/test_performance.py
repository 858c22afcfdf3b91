"""Memory of a step, as every rank tells it, and rates per GPU."""

from pathlib import Path

import pytest

from megarl.common.values import GIB
from megarl.models.hf.read_config import load_info
from megarl.run.record.batch_metrics import Performance
from tests.support.models.tiny import make_tiny_model
from tests.support.ranks.training.performance import HELD_B
from tests.support.trainer.configs import config


def test_the_peak_is_the_highest_of_all_ranks_and_over_time(world) -> None:
    (first, resident_0), (second, resident_1) = world(2).run("tests.support.ranks.training.performance:peaks")
    assert first == second
    # Resident memory of rank 0, and of rank 1 by now, says nothing of what rank 1 held.
    assert first > max(resident_0, resident_1) + 0.5 * HELD_B / GIB
    assert first < resident_1 + 2 * HELD_B / GIB


def test_lost_replicas_count_in_rates_per_gpu(tmp_path: Path) -> None:
    """They hold their GPUs until they are replaced: a run that loses engines must not look more efficient."""
    model = make_tiny_model(tmp_path / "model", "qwen3")
    planned = config(model)
    performance = Performance(planned, load_info(model))
    step = {
        "batch/trained_tokens": 10.0, "batch/response_tokens": 30.0, "time/logprobs": 1.0, "time/update": 1.0,
        "time/step": 5.0, "rollout/engine_seconds": 2.0, "rollout/replicas_alive": 2.0, "rollout/replicas_lost": 1.0,
    }  # fmt: skip
    rates = performance.of_step(step)
    engine_gpus, trainer_gpus = 3 * planned.rollout.tensor_parallel, planned.trainer.gpus
    assert rates["perf/rollout_tokens_per_second_per_gpu"] == pytest.approx(15.0 / engine_gpus)
    assert rates["perf/tokens_per_second_per_gpu"] == pytest.approx(2.0 / (trainer_gpus + engine_gpus))
    # Tokens that are trained again were not generated again.
    rates = performance.of_step(step | {"batch/reused_tokens": 10.0})
    assert rates["perf/rollout_tokens_per_second_per_gpu"] == pytest.approx(10.0 / engine_gpus)
