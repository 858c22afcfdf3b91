"""Samples from large files: windows that miss nothing they should have, and a choice that shows the run."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.reading import samples_file
from megarl.report.reading.samples_file import Place, choose, read_samples, shortened, windows
from tests.support.telemetry.reported_runs import sample_line


def place(number: int, tokens: int = 10, reward: float | None = 0.5, failed: bool = False) -> Place:
    return Place(Path("samples.jsonl"), number, number, tokens, reward, "stop", failed)


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    lines = [sample_line(step, response_tokens=step) for step in range(1, 31)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 31, "gr')
    found = read_samples(tmp_path, 10)
    assert found.whole and found.lengths == list(range(1, 31))
    assert len(found.samples) == 10
    assert found.samples[0].step == 1 and found.samples[-1].step == 30
    assert found.samples[-1].response == lines[-1]["response"]


def test_of_a_large_file_windows_are_read_and_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_file, "MOST_BYTES", 40_000)
    monkeypatch.setattr(samples_file, "WINDOW_BYTES", 2000)
    for part, steps in (("samples.000000000000000.jsonl", range(1, 400)), ("samples.jsonl", range(400, 800))):
        text = "".join(json.dumps(sample_line(step, response="x" * (step % 90))) + "\n" for step in steps)
        (tmp_path / part).write_text(text)
    found = read_samples(tmp_path, 8)
    steps = [each.step for each in found.places]
    assert not found.whole and steps == sorted(set(steps)) and 60 < len(steps) < 200
    assert min(steps) == 1 and max(steps) > 750
    assert [sample.step for sample in found.samples] == sorted(sample.step for sample in found.samples)
    with (tmp_path / "samples.jsonl").open("r+b") as file:  # as after a rotation between the two looks
        file.truncate(10)
    monkeypatch.setattr(samples_file, "_parts", lambda path: [])
    assert read_samples(tmp_path, 8).samples == []


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_windows_cover_small_files_and_stay_inside_large_ones(sizes: list[int]) -> None:
    parts = [(Path(str(number)), size) for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_file, "MOST_BYTES", 200)
        patch.setattr(samples_file, "WINDOW_BYTES", 20)
        found = list(windows(parts))
    if sum(sizes) <= 200:
        assert found == [(path, 0, size) for path, size in parts]
        return
    assert sum(end - start for _, start, end in found) <= 200
    for path, start, end in found:
        assert 0 <= start < end <= dict(parts)[path]
    for (path, _, end), (after, start, _) in pairwise(found):
        assert path != after or start >= end


def test_windows_that_touch_read_every_line_once(tmp_path: Path) -> None:
    lines = [json.dumps(sample_line(step, response="y" * (step * 7 % 60))) + "\n" for step in range(1, 40)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(lines))
    for width in (50, 333, 2000):
        size = path.stat().st_size
        cuts = [(start, min(start + width, size)) for start in range(0, size, width)]
        steps = [each.step for start, end in cuts for each in samples_file._brief(path, start, end)]
        assert steps == list(range(1, 40)), width


@given(st.lists(st.builds(place, st.just(0), st.integers(0, 50), st.one_of(st.none(), st.floats(-1, 1)), st.booleans()),
                max_size=80), st.integers(4, 20))  # fmt: skip
def test_the_choice_is_small_in_order_and_has_the_ends(places: list[Place], count: int) -> None:
    numbered = [Place(each.path, n, n, each.tokens, each.reward, "stop", each.failed) for n, each in enumerate(places)]
    chosen = choose(numbered, count)
    steps = [each.step for each in chosen]
    assert steps == sorted(set(steps)) and len(chosen) == min(count, len(places))
    if places:
        assert steps[0] == 0 and steps[-1] == len(places) - 1
    recent = numbered[len(numbered) - max(1, len(numbered) // 5) :] if numbered else []
    if len(places) > count:
        assert max(each.tokens for each in recent) == max(each.tokens for each in chosen if each in recent)


def test_failed_and_extreme_samples_of_the_last_steps_are_chosen() -> None:
    places = [place(number) for number in range(1000)]
    places[950] = place(950, reward=-3.0)
    places[951] = place(951, reward=7.0)
    places[952] = place(952, tokens=9999)
    places[953] = place(953, reward=None, failed=True)
    assert {950, 951, 952, 953} <= {each.step for each in choose(places, 12)}


def test_a_long_text_keeps_its_ends() -> None:
    text = "a" * 5000 + "b" * 5000
    short = shortened(text, 300)
    assert short.startswith("a" * 200) and short.endswith("b" * 100) and "9,700 characters left out" in short
    assert shortened("short", 300) == "short"
