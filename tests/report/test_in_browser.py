"""The page in a real browser: no script error, every plot drawn, nothing loaded, in light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import main
from tests.support.telemetry.browser import Page, browser
from tests.support.telemetry.reported_events import write_slow_trajectories
from tests.support.telemetry.reported_runs import evaluation_line, sample_line, small_run, step_line, write_run

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"

# For each plot: its key, and the share of its canvas that is painted in the color of a line.
PAINTED = """
[...document.querySelectorAll("[data-figure]")].map((box) => {
  const canvas = box.querySelector("canvas");
  if (!canvas) return [box.dataset.figure, 0];
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let colored = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.slice(at, at + 4);
    if (alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) colored += 1;
  }
  return [box.dataset.figure, colored];
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def report(tmp_path: Path, *runs: Path) -> Path:
    out = tmp_path / "page.html"
    assert main.main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out


def painted(page: Page) -> dict[str, int]:
    return dict(page.evaluate(PAINTED))


def test_every_plot_is_drawn_and_nothing_is_loaded(page: Page, tmp_path: Path) -> None:
    first, second = small_run(tmp_path / "first"), small_run(tmp_path / "second", steps=25)
    write_slow_trajectories(first)
    page.errors.clear()
    page.requests.clear()
    page.open(report(tmp_path, first, second))
    assert page.errors == []
    assert all(url.startswith("file:") and url.endswith("page.html") for url in page.requests), page.requests
    plots = painted(page)
    assert len(plots) >= 18 and min(plots.values()) > 50, plots
    asked = page.evaluate('JSON.parse(document.getElementById("data").textContent).figures.map((each) => each.key)')
    assert sorted(asked) == sorted(plots)
    for kind in (".histogram", ".budget", ".engines", ".slow"):
        heights = page.evaluate(f"[...document.querySelectorAll('{kind} i')].map((each) => each.offsetHeight)")
        assert heights and max(heights) > 3, (kind, heights)
    texts = page.evaluate("document.querySelector('.plot .u-legend').textContent")
    assert "first" in texts and "second" in texts


def test_switches_redraw_every_plot(page: Page, tmp_path: Path) -> None:
    page.errors.clear()
    page.open(report(tmp_path, small_run(tmp_path / "run")))
    page.evaluate("document.querySelector('[data-axis=hours]').click()")
    assert min(painted(page).values()) > 50
    assert "hours" in page.evaluate("document.querySelector('.plot .u-legend').textContent")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.evaluate("document.getElementById('theme').click()")
    assert page.evaluate(background) != light and min(painted(page).values()) > 50
    page.evaluate("document.getElementById('theme').click()")
    page.prefer("dark")
    page.open(tmp_path / "page.html")
    assert page.evaluate(background) != light and min(painted(page).values()) > 50
    page.prefer("light")
    assert page.errors == []


def test_a_narrow_window_shows_all_without_sideways_scrolling(page: Page, tmp_path: Path) -> None:
    page.errors.clear()
    page.open(report(tmp_path, *(small_run(tmp_path / name) for name in ("first", "second", "third", "fourth"))))
    page.resize(390, 800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert min(painted(page).values()) > 50
    page.resize(1400, 1000)
    assert page.errors == []


def test_what_a_model_writes_is_shown_as_text(page: Page, tmp_path: Path) -> None:
    lines = [evaluation_line(0, 0.5, name=ATTACK.replace("/", "|"))]
    lines += [step_line(1) | {f"reward/component/{ATTACK.replace('/', '|')}": 0.5}]
    parts = [{"by": "model", "text": ATTACK}, {"by": "environment", "text": ATTACK}]
    samples = [
        sample_line(1, 0, prompt=ATTACK, response=ATTACK, reference=ATTACK, reward_components={ATTACK: 1.0}),
        sample_line(1, 1, parts=parts, status="failed", failure=ATTACK, reward_error=ATTACK, dataset=ATTACK),
    ]
    run = write_run(tmp_path / "run <b onclick=x>", lines, samples, {"run": {"name": ATTACK, ATTACK: ATTACK}})
    (run / "logs").mkdir()
    (run / "logs" / "notices.jsonl").write_text('{"text": "<script>window.attacked = 3</script>"}\n')
    page.errors.clear()
    page.open(report(tmp_path, run, small_run(tmp_path / "other")))
    assert page.evaluate("window.attacked === undefined") and page.errors == []
    assert page.evaluate("document.querySelectorAll('img, iframe, script[src], link').length") == 0
    shown = page.evaluate("document.querySelector('.samples').textContent")
    assert shown.count(ATTACK) >= 9
    assert page.evaluate("document.querySelectorAll('script').length") == 3
    late = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.attacked = 4'}))"
    page.evaluate(late)
    assert page.evaluate("window.attacked === undefined") and "Content Security Policy" in page.errors[0]


def test_a_run_without_steps_has_a_page(page: Page, tmp_path: Path) -> None:
    page.errors.clear()
    page.open(report(tmp_path, write_run(tmp_path / "run", [])))
    assert page.errors == [] and "No step has ended yet" in page.evaluate("document.body.textContent")
