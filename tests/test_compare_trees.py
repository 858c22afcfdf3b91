"""The comparison of two trees sees a difference in everything that it says it compares."""

import io
import json
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megarl.config.loading.load import config_from_tree
from tests.support.checkout import ROOT
from tests.support.repository.compare_trees import (
    DifferenceError,
    compare_replays,
    compare_runs,
    declare_entry_points,
    records_of,
)
from tests.support.repository.older_configs import REMOVED_VALUES, for_this_tree, keys_of, known_part, renamed_for
from tests.support.trainer.configs import tree, with_sections


def test_an_older_checkout_finds_its_own_plugins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "megarl"\n[project.entry-points."torchrun.handlers"]\nmegarl = "older.module:handler"\n'
    )
    declare_entry_points(tmp_path)
    (found,) = Distribution.discover(name="megarl", path=[str(tmp_path)])
    assert [(point.group, point.value) for point in found.entry_points] == [
        ("torchrun.handlers", "older.module:handler")
    ]


def write_run(directory: Path) -> Path:
    """The files of a finished run that are compared, as small as they can be."""
    checkpoint = directory / "checkpoints" / "iter_0000003"
    for folder in (directory / "hf", directory / "batches", checkpoint):
        folder.mkdir(parents=True)
    (directory / "hf" / "model.safetensors").write_bytes(b"weights")
    write_checkpoint(checkpoint, 1.0)
    write_batches(directory, "the prompt")
    (directory / "eval_3.jsonl").write_text('{"response": "4"}\n')
    (directory / "samples.jsonl").write_text('{"response": "5"}\n')
    write_metrics(directory, 0.5)
    return directory


def write_checkpoint(checkpoint: Path, value: float) -> None:
    save({"weight": torch.full((4,), value)}, storage_writer=FileSystemWriter(checkpoint), no_dist=True)


def write_batches(run: Path, prompt: str, **more: Any) -> None:
    rows = [{"prompt": prompt, "response_ids": [1, 2], **more}]
    pandas.DataFrame(rows).to_parquet(run / "batches" / "step_0000000.parquet")


def write_metrics(run: Path, loss: float, seconds: float = 1.0, **more: float) -> None:
    values = {"step": 1, "policy/loss": loss, "time/step": seconds, **more}
    (run / "metrics.jsonl").write_text(json.dumps(values) + "\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "exported files": lambda run: (run / "hf" / "model.safetensors").write_bytes(b"weightz"),
    "checkpoints": lambda run: (run / "checkpoints" / "iter_0000003").rename(run / "checkpoints" / "iter_0000004"),
    "tensors of iter_0000003": lambda run: write_checkpoint(run / "checkpoints" / "iter_0000003", 2.0),
    "recorded batches": lambda run: write_batches(run, "another prompt"),
    "answers of evaluations": lambda run: (run / "eval_3.jsonl").write_text('{"response": "5"}\n'),
    "samples": lambda run: (run / "samples.jsonl").write_text('{"response": "4"}\n'),
    "metrics": lambda run: write_metrics(run, 0.5000001),
}


def difference(before: Path, after: Path) -> str | None:
    """Return what the comparison of two runs names, None if they are equal."""
    try:
        compare_runs("dense", before, after)
    except DifferenceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_found_and_named(tmp_path: Path, what: str) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    assert difference(before, after) is None
    CHANGES[what](after)
    assert str(difference(before, after)).startswith(f"dense: {what}: ")


@pytest.mark.parametrize("removed", ["hf/model.safetensors", "eval_3.jsonl"])
def test_nothing_to_compare_is_no_equality(tmp_path: Path, removed: str) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    for run in (before, after):
        (run / removed).unlink()
    assert "there are none" in str(difference(before, after))


def test_timings_and_columns_of_one_tree_are_no_difference(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    write_metrics(after, 0.5, seconds=2.0, new=1.0)
    write_batches(after, "the prompt", response_mask=1)
    assert difference(before, after) is None
    write_batches(before, "the prompt", response_mask=1)
    assert "new: 1.0 before, None after" in str(difference(after, before))


def test_fields_of_lines_that_only_the_new_tree_has_are_named_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    (after / "eval_3.jsonl").write_text('{"response": "4", "versions": [[3, 0, 1]]}\n')
    (after / "samples.jsonl").write_text('{"response": "5", "epoch": 0}\n')
    assert difference(before, after) is None
    assert capsys.readouterr().out.splitlines() == [
        "dense: answers of evaluations: not compared, as only the new tree has them: versions",
        "dense: samples: not compared, as only the new tree has them: epoch",
    ]
    assert "eval_3.jsonl, line 0, versions" in str(difference(after, before)), "a field that is gone is a difference"
    (after / "eval_3.jsonl").write_text('{"response": "5", "versions": [[3, 0, 1]]}\n')
    assert "eval_3.jsonl, line 0, response: 4 before, 5 after" in str(difference(before, after))


def test_fields_of_a_samples_spans_that_only_the_new_tree_has_are_no_difference(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    (before / "samples.jsonl").write_text('{"versions": [{"version": 0}]}\n')
    (after / "samples.jsonl").write_text('{"versions": [{"version": 0, "replica": 0}]}\n')
    assert difference(before, after) is None
    (after / "samples.jsonl").write_text('{"versions": [{"version": 1, "replica": 0}]}\n')
    assert "line 0, versions.version: [0] before, [1] after" in str(difference(before, after))


def test_fields_of_spans_that_one_tree_has_are_no_difference_and_the_others_are(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    write_batches(before, "the prompt", versions=[{"version": 1, "start": 0}])
    write_batches(after, "the prompt", versions=[{"version": 1, "start": 0, "epoch": 0}])
    assert difference(before, after) is None
    write_batches(after, "the prompt", versions=[{"version": 2, "start": 0, "epoch": 0}])
    assert "row 0, versions.version: [1] before, [2] after" in str(difference(before, after))


def test_checksums_of_an_archive_are_no_difference() -> None:
    """Saves leave them out since some commit."""

    def stored(checksums: bool, value: float) -> bytes:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(checksums)
        try:
            torch.save(torch.full((4,), value), content := io.BytesIO())
        finally:
            torch.serialization.set_crc32_options(before)
        return content.getvalue()

    assert stored(True, 1.0) != stored(False, 1.0)
    assert records_of(stored(True, 1.0)) == records_of(stored(False, 1.0)) != records_of(stored(False, 2.0))


def test_the_number_of_buckets_is_no_outcome(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    for run, buckets in ((before, 5.0), (after, 4.0)):
        write_metrics(run, 0.5, **{"sync/buckets": buckets})
    compare_runs("same", before, after)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("weights of the run, and of its replay before", lambda run: CHANGES["exported files"](run.parent / "before")),
        ("weights of the run, and of its replay after", lambda run: CHANGES["exported files"](run.parent / "after")),
        ("metrics of the replays", lambda run: CHANGES["metrics"](run.parent / "after")),
    ],
)
def test_a_difference_between_replays_is_found_and_named(
    tmp_path: Path, what: str, change: Callable[[Path], object]
) -> None:
    run, before, after = (write_run(tmp_path / name) for name in ("run", "before", "after"))
    compare_replays("async", run, before, after)
    change(run)
    with pytest.raises(DifferenceError, match=f"async: {what}: 1 differ"):
        compare_replays("async", run, before, after)


OLDER_PAGE = """
## `monitor`
| key | type | default | meaning |
|---|---|---|---|
| `min_tokens` | integer | `256` | Tokens. |
## `monitor.entropy`
| `threshold` | number | `0.003` | Alarm below it. |
## `telemetry`
| `metrics_gib` | number | `4.0` | Bound. |
## `door`
| `enabled` | boolean | `false` | Serve. |
## `data.sets[]`
| `path` | path | required | File. |
## `reward`
| `kwargs` | mapping | `{}` | Arguments. |
"""


def test_each_tree_gets_its_own_names_of_keys(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert keys_of(tmp_path) == set()
    (tmp_path / "docs" / "configuration.md").write_text(OLDER_PAGE)
    keys = keys_of(tmp_path)
    assert {"monitor", "monitor.min_tokens", "door.enabled", "data.sets", "data.sets.path"} <= keys
    new = {
        "monitor": {"min_tokens": 1, "rules": {"entropy": {"threshold": 0.1}}, "new": 1},
        "gateway": {"enabled": True},
        "telemetry": {"keep_gib": 2.0},
    }
    old = {
        "monitor": {"min_tokens": 1, "rules": {}, "new": 1, "entropy": {"threshold": 0.1}},
        "door": {"enabled": True},
        "telemetry": {"metrics_gib": 2.0},
    }
    assert renamed_for(keys, new) == renamed_for(keys, old) == old
    assert renamed_for({"gateway", "monitor.rules"}, old) == new
    stored = {**old, "data": {"sets": [{"path": "x"}]}, "reward": {"kwargs": {"any": {"thing": 1}}}, "queue": {}}
    del stored["data"]
    assert known_part(keys, stored) == {
        "monitor": {"min_tokens": 1, "entropy": {"threshold": 0.1}},
        "door": {"enabled": True},
        "telemetry": {"metrics_gib": 2.0},
        "reward": {"kwargs": {"any": {"thing": 1}}},
    }


def test_a_config_with_keys_that_are_gone_is_one_of_this_tree_once_it_is_rewritten(tmp_path: Path) -> None:
    """Each row of names that is not of this tree is among them, so what this table says is what a user may do."""
    older = with_sections(tree(tmp_path), REMOVED_VALUES)
    config = config_from_tree(for_this_tree(older))
    assert config.telemetry.keep_gib == 1.0 and config.telemetry.events_mib == 16.0
    assert config.monitor.rules["entropy"].threshold == 0.001
    stored = config.model_dump(mode="json")
    assert known_part(keys_of(ROOT), stored) == stored, "the page has every key, so nothing is lost"
