"""The pictures of docs/images: the committed files are what the committed numbers and descriptions give."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.checkout import ROOT
from tests.support.reported_runs import evaluation_line, step_line, write_run
from tools.images.drawings import IMAGES, NUMBERS, drawings
from tools.images.quickstart_run import QuickstartRun, reduced
from tools.images.system import SYSTEM, Box

SVG = "{http://www.w3.org/2000/svg}"
WIDEST = 7.1  # of a letter, in the units of the drawings, on average in a wide font of 13 px


def test_drawing_anew_gives_the_committed_files() -> None:
    """If this fails, run `make docs`."""
    drawn = drawings()
    assert {name: (IMAGES / name).read_text() for name in drawn} == drawn
    assert {path.name for path in IMAGES.iterdir()} == {*drawn, NUMBERS}


@pytest.mark.parametrize("name", sorted(drawings()))
def test_a_drawing_is_shown_by_readme_and_site_and_says_what_it_shows(name: str) -> None:
    root = ElementTree.fromstring((IMAGES / name).read_text())
    assert root.findtext(f"{SVG}title") and root.findtext(f"{SVG}desc")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height, text.text
    assert f"](docs/images/{name})" in (ROOT / "README.md").read_text()
    assert f"](images/{name})" in (ROOT / "docs/index.md").read_text()


def test_the_numbers_of_the_readme_are_those_of_the_pictured_run() -> None:
    run = QuickstartRun.model_validate_json((IMAGES / NUMBERS).read_text())
    before, after = run.evaluations
    assert len(run.rewards) == len(run.stderrs) == after.step == 20 and before.step == 0
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"from {before.greedy[0]:.1%} to {after.greedy[0]:.0%} (greedy)" in readme
    assert f"from {before.sampled[0]:.1%} to {after.sampled[0]:.1%} (sampled), n = {after.problems}" in readme


def test_texts_fit_their_boxes_and_boxes_do_not_overlap() -> None:
    for box in SYSTEM.boxes:
        assert max(len(line) for line in (box.title, *box.lines)) * WIDEST < box.width - 14, box.key
        assert 25 + 17 * len(box.lines) < box.height, box.key
    for number, box in enumerate(SYSTEM.boxes):
        assert not [other.key for other in SYSTEM.boxes[:number] if _overlap(box, other)], box.key


def _overlap(one: Box, other: Box) -> bool:
    return (
        abs(one.x + one.width / 2 - other.x - other.width / 2) < (one.width + other.width) / 2
        and abs(one.y + one.height / 2 - other.y - other.height / 2) < (one.height + other.height) / 2
    )


def test_a_run_is_reduced_to_what_its_picture_needs(tmp_path: Path) -> None:
    lines = [evaluation_line(0, 0.25, name="additions"), step_line(1), step_line(2)]
    lines += [evaluation_line(2, 0.75, name="additions")]
    folder = write_run(tmp_path / "run", lines, [], {"batch": {"groups": 3, "samples_per_group": 4}})
    run = reduced(folder)
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.rewards == [round(line["reward/mean"], 4) for line in written if "reward/mean" in line]
    assert [(each.step, each.greedy[0]) for each in run.evaluations] == [(0, 0.25), (2, 0.75)]
    assert run.samples_per_step == 12 and run.command == "make quickstart"
