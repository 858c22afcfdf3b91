"""A killed conversion leaves nothing that loads as complete, and its resume ends with the same bits."""

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.support.checkpoints.converter import convert, files_of, run, run_forked, wait_for_lock
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.slow

POINTS = ["shard", "metadata", "manifest", "rename"]
DRAWN = {"release/.metadata", "release/manifest.json", "release/common.pt"}  # with ids that torch draws


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A Hugging Face directory, its Megatron checkpoint, and the export of that."""
    root = tmp_path_factory.mktemp("models")
    source = make_tiny_model(root / "hf", "qwen3_moe", num_hidden_layers=6, hidden_size=96, intermediate_size=128)
    convert("import", "--hf", source, "--out", root / "megatron")
    convert("export", "--megatron", root / "megatron", "--hf", root / "back", "--shard-gb", 2e-4)
    return source, root / "megatron", root / "back"


def arguments(kind: str, models: tuple[Path, Path, Path], out: Path) -> list[object]:
    source, megatron, _ = models
    if kind == "import":
        return ["import", "--hf", source, "--out", out]
    return ["export", "--megatron", megatron, "--hf", out, "--shard-gb", 2e-4]


def check_equal(kind: str, models: tuple[Path, Path, Path], out: Path) -> None:
    _, megatron, back = models
    expected, found = files_of(megatron if kind == "import" else back), files_of(out)
    assert expected.keys() == found.keys()
    assert {name for name in found if found[name] != expected[name]} <= (DRAWN if kind == "import" else set())
    assert not out.with_name(f".{out.name}.converting").exists()


@pytest.mark.parametrize(("point", "workers"), [*((point, 1) for point in POINTS), ("shard", 2)])
@pytest.mark.parametrize("kind", ["import", "export"])
def test_killed_at_a_named_point(
    kind: str, point: str, workers: int, models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """With one worker the converter itself dies at a shard; with two a worker dies, and the converter says so."""
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    command = [*arguments(kind, models, out), "--workers", workers]
    code = run_forked(*command, KILL_AT=point, KILL_MARKS=str(marks))
    assert (marks / point).exists(), "the point was not reached"
    assert code == (1 if workers == 2 else -9)
    assert not out.exists()
    wait_for_lock(out)
    assert run("verify", models[0], out)[0] == 1
    convert(*command, "--resume")
    check_equal(kind, models, out)


@pytest.fixture(scope="module")
def durations(models: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Seconds that an unbroken conversion takes here and now, by kind."""
    found = {}
    for kind in ("import", "export"):
        out, began = tmp_path_factory.mktemp(kind) / "out", time.monotonic()
        assert run_forked(*arguments(kind, models, out), "--workers", 2) == 0
        found[kind] = time.monotonic() - began
    return found


def _random_kills(seeds: range) -> list[object]:
    return [pytest.param(seed, marks=[] if seed == 0 else [pytest.mark.slow]) for seed in seeds]


@pytest.mark.parametrize("seed", _random_kills(range(10)))
@pytest.mark.parametrize("kind", ["import", "export"])
def test_killed_at_random(
    kind: str, seed: int, models: tuple[Path, Path, Path], durations: dict[str, float], tmp_path: Path
) -> None:
    """Killed up to four times at random moments of a conversion's time, each time resumed, until it gets through.

    Every seed kills at least once, so that ten seeds are ten kills or more: a conversion that was through before its
    moment came starts again, with a moment out of half the time.
    """
    draw, out, kills, latest = random.Random(f"{kind} {seed}"), tmp_path / "out", 0, durations[kind]
    command = [*arguments(kind, models, out), "--workers", 2]
    while True:
        resume = ["--resume"] if out.with_name(".out.converting").exists() else []
        code = run_forked(*command, *resume, kill_after=draw.uniform(0.0, latest) if kills < 4 else None)
        wait_for_lock(out)
        assert code in (0, -9)
        kills += code == -9
        if code == 0 and kills:
            break
        if code == 0:
            shutil.rmtree(out)
            latest /= 2
        elif out.exists():
            assert source_is_whole(kind, models, out)
            if out.with_name(".out.converting").exists():
                assert run_forked(*command, "--resume") == 0
            break
    assert kills >= 1
    check_equal(kind, models, out)


def source_is_whole(kind: str, models: tuple[Path, Path, Path], out: Path) -> bool:
    """Killed between the rename and the removal of the leftovers: the output must be complete then."""
    return files_of(out).keys() == files_of(models[1] if kind == "import" else models[2]).keys()


def test_two_at_once(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The second conversion says that another one is running, and touches nothing."""
    import fcntl

    out = tmp_path / "out"
    work = tmp_path / ".out.converting"
    work.mkdir()
    with (work / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = run(*arguments("import", models, out), "--force")
    assert code == 1 and "another process is converting" in err
    assert [path.name for path in work.iterdir()] == ["lock"]
