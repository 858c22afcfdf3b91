"""`torchrun convert.py ...`: the ranks share the units, and fail together."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from megarl.checkpoint.convert.target import Output
from tests.support.checkpoints.converter import convert, run
from tests.support.models.tensors import differing
from tests.support.worlds.world import World

pytestmark = pytest.mark.world
CASE = "tests.support.ranks.checkpoints.checkpoints:convert_on_ranks"


def test_ranks_share_the_work(world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("qwen3_moe")
    arguments = ["import", "--hf", str(source), "--out", str(tmp_path / "m")]
    results = world(2).run(CASE, arguments=[*arguments, "--dry-run"], attempt=f"{tmp_path}/0")
    assert "over 2 rank(s) of 1 worker(s)" in results[0][1] and not (tmp_path / "m").exists()
    results = world(2).run(CASE, arguments=arguments, attempt=f"{tmp_path}/1")
    assert [code for code, _, _ in results] == [0, 0], results
    assert "GB/s" in results[0][1] and results[1][1] == ""  # rank 0 alone speaks
    arguments = ["export", "--megatron", str(tmp_path / "m"), "--hf", str(tmp_path / "hf")]
    assert [code for code, _, _ in world(2).run(CASE, arguments=arguments, attempt=f"{tmp_path}/2")] == [0, 0]
    assert differing(source, tmp_path / "hf") == []


def test_one_rank_fails_all(world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 0 names the rank and the reason, and the units that are done are kept."""
    source, out = model_dir("qwen3"), tmp_path / "m"
    arguments = ["import", "--hf", str(source), "--out", str(out)]
    results = world(2).run(CASE, arguments=arguments, attempt=f"{tmp_path}/0", failing_rank=1)
    assert [code for code, _, _ in results] == [1, 1]
    assert "rank 1 failed: writing unit 1" in results[0][2] and "Read-only file system" in results[0][2]
    assert not out.exists()
    assert "of it before the resume" in convert(*arguments, "--resume")
    convert("export", "--megatron", out, "--hf", tmp_path / "hf")
    assert differing(source, tmp_path / "hf") == []


@pytest.mark.parametrize("complete", [False, True])
def test_all_ranks_resume(
    complete: bool, world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """`complete`: killed between the rename and the removal of the leftovers, which rank 0 alone sees."""
    source, out = model_dir("qwen3"), tmp_path / "m"
    arguments = ["import", "--hf", str(source), "--out", str(out)]
    with mock.patch.object(Output, "clean" if complete else "commit", side_effect=OSError("killed")):
        assert run(*arguments)[0] == 1
    assert out.exists() == complete
    results = world(2).run(CASE, arguments=[*arguments, "--resume"], attempt=f"{tmp_path}/0")
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1].startswith(f"{out} is complete already" if complete else f"{out}: ") and results[1][1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    convert("export", "--megatron", out, "--hf", tmp_path / "hf")
    assert differing(source, tmp_path / "hf") == []
