"""Retention and the comparison of checkpoints, exact, without ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.save.directory import (
    EVALUATION_FILE,
    STATE_FILE,
    CheckpointDirectory,
    CheckpointRetention,
    best_step,
    to_delete,
)
from megarl.config.schema.job import CheckpointConfig
from tests.support.checkpoints.sample_checkpoints import make_checkpoint, verify


@given(
    st.sets(st.integers(1, 60), max_size=20),
    st.integers(1, 4),
    st.integers(0, 7),
    st.none() | st.integers(1, 60),
)
def test_retention(steps: set[int], last: int, every: int, best: int | None) -> None:
    obsolete = to_delete(steps, keep_last=last, keep_every=every, best=best)
    kept = steps - set(obsolete)
    assert set(obsolete) <= steps and obsolete == sorted(obsolete)
    assert set(sorted(steps)[-last:]) <= kept
    assert best not in obsolete
    assert all(step % every for step in obsolete) if every else True
    newest = set(sorted(steps)[-last:])
    assert all(step in newest | {best} or (every and step % every == 0) for step in kept)


def test_the_best_is_the_earliest_of_equals() -> None:
    assert best_step({2: 0.5, 4: 0.7, 6: 0.7}) == 4
    assert best_step({}) is None


def retention_of(directory: CheckpointDirectory, **settings: Any) -> tuple[CheckpointRetention, list[str]]:
    """Return a retention that keeps the newest and the best checkpoint, and what it reports."""
    reported: list[str] = []
    chosen = CheckpointConfig(**{"keep_last": 1, "keep_best": "eval/held/greedy"} | settings)
    return CheckpointRetention(directory, chosen, reported.append), reported


def test_a_value_that_comes_after_the_save_is_compared(directory: CheckpointDirectory) -> None:
    """The better of two stays when later ones come; the manifest, and so the checkpoint, is as it was."""
    retention, reported = retention_of(directory)
    for step, value in ((2, 0.5), (4, 0.7), (6, 0.6)):
        make_checkpoint(directory, step)
        retention.apply(step)
        retention.evaluated(step, {"eval/held/greedy": value})
        assert directory.metrics(step) == {"eval/held/greedy": value} and verify(directory.path(step)) == []
    assert directory.steps() == [4, 6]
    retention.evaluated(6, {"eval/held/greedy": 0.8})
    assert directory.steps() == [6] and reported == [], "no later save is needed to find what is not the best any more"


def test_metrics_that_the_checkpoint_has_are_not_written_again(directory: CheckpointDirectory) -> None:
    retention, _ = retention_of(directory)
    path = make_checkpoint(directory, 2)
    (path / STATE_FILE).write_text('{"metrics": {"eval/held/greedy": 0.5}}')
    retention.evaluated(2, {"eval/held/greedy": 0.5})
    assert not (path / EVALUATION_FILE).exists()


def test_without_keep_best_a_late_evaluation_deletes_nothing(directory: CheckpointDirectory) -> None:
    """A run that sets it later finds the value."""
    retention, _ = retention_of(directory, keep_best=None)
    for step in (2, 4):
        make_checkpoint(directory, step)
    retention.evaluated(4, {"eval/held/greedy": 0.5})
    assert directory.steps() == [2, 4] and directory.metrics(4) == {"eval/held/greedy": 0.5}


def test_a_value_that_cannot_be_written_or_read_costs_only_the_comparison(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention, reported = retention_of(directory)
    make_checkpoint(directory, 2)
    with monkeypatch.context() as patched:
        patched.setattr(directory, "add_metrics", lambda step, metrics: (_ for _ in ()).throw(OSError("disk is full")))
        retention.evaluated(2, {"eval/held/greedy": 0.5})
    assert reported == ["the evaluation of step 2 could not be added to its checkpoint: disk is full"]
    (directory.path(2) / EVALUATION_FILE).write_text("{")
    make_checkpoint(directory, 4)
    retention.apply(4)
    assert f"the metrics of {directory.path(2)} cannot be read: " in reported[1] and directory.steps() == [4]


@pytest.mark.parametrize("damaged", ["[]", "null", '{"eval/held/greedy": [0.9]}', '{"eval/held/greedy": "high"}'])
def test_an_evaluation_of_another_form_fails_no_save_and_is_replaced(
    directory: CheckpointDirectory, damaged: str
) -> None:
    """The manifest does not list the file, so nothing else finds what has become of it."""
    retention, reported = retention_of(directory)
    for step in (2, 4):
        (make_checkpoint(directory, step) / EVALUATION_FILE).write_text(damaged)
    retention.apply(4)
    assert directory.steps() == [4] and f"the metrics of {directory.path(2)} cannot be read: " in reported[0]
    retention.evaluated(4, {"eval/held/greedy": 0.5})
    assert directory.metrics(4) == {"eval/held/greedy": 0.5} and verify(directory.path(4)) == []


def test_the_evaluation_of_a_checkpoint_that_was_removed_is_reported(directory: CheckpointDirectory) -> None:
    """Somebody has removed it by hand while the run evaluated."""
    retention, reported = retention_of(directory)
    for step in (2, 4):
        make_checkpoint(directory, step)
    directory.delete(4)
    retention.evaluated(4, {"eval/held/greedy": 0.5})
    assert len(reported) == 1 and reported[0].startswith(
        "the evaluation of step 4 could not be added to its checkpoint: "
    )
    assert directory.steps() == [2] and not directory.path(4).exists()
