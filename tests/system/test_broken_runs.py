"""Whole runs with a broken rule, each of which must show in the run's own metrics."""

from pathlib import Path

import pytest
import yaml

from tests.support.checkout import ROOT, torchrun
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, popen, step_records, tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("rule", "broken"),
    [("temperature", [True, True, True]), ("sync", [False, True, False])],  # the step after version 1
)
def test_what_is_off_policy_exceeds_the_bounds(tmp_path: Path, rule: str, broken: list[bool]) -> None:
    """The bounds that sound runs keep (`test_train`) find a temperature that is ignored, and a sync that is skipped."""
    config = tiny_config(tmp_path, steps=3)
    config["sampling"]["temperature"] = 0.6
    config["trainer"]["optimizer"]["lr"] = 1e-2
    config["evaluation"] = {}
    path, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    process = popen(
        torchrun(2, str(ROOT / "tests/support/trainer/broken_run.py"), rule, "--config", str(path)), run_dir
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    records = step_records(run_dir)
    assert [record["mismatch/logprob_abs_diff_max"] > ON_POLICY_MAX for record in records] == broken
    assert [record["mismatch/logprob_abs_diff_mean"] > ON_POLICY_MEAN for record in records] == broken
    assert_nothing_left(run_dir)
