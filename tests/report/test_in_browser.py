"""The page in a real browser: no script error, every plot drawn, nothing loaded, in light and dark, wide and narrow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import main
from tests.support.telemetry.browser import Page, browser
from tests.support.telemetry.reported_events import write_alarm, write_slow_trajectories
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
    assert len(plots) >= 24 and min(plots.values()) > 50, plots
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


# Redraws every plot, and returns the texts that are painted for the figure `lr`: the labels of both axes.
LABELS = """
(async () => {
  const texts = new Map(), paint = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    texts.set(this.canvas, [...(texts.get(this.canvas) || []), text]);
    return paint.call(this, text, ...place);
  };
  document.querySelector("[data-axis=hours]").click();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  CanvasRenderingContext2D.prototype.fillText = paint;
  return texts.get(document.querySelector("[data-figure=lr] canvas"));
})()
"""


def test_labels_of_an_axis_differ(page: Page, tmp_path: Path) -> None:
    """The learning rate falls by less than a half per cent: two digits would be the same everywhere."""
    page.open(report(tmp_path, small_run(tmp_path / "run")))
    rates = [text for text in page.evaluate(LABELS) if "e-" in text]
    assert len(rates) >= 3 and len(set(rates)) == len(rates), rates


# Of each text that is seen: what it is, and its contrast to the nearest background that is painted (WCAG 2.2).
CONTRASTS = """
(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (color) => weights.reduce((sum, weight, at) => sum + weight * channel(parts(color)[at]), 0);
  const ratio = (one, two) => (Math.max(light(one), light(two)) + 0.05) / (Math.min(light(one), light(two)) + 0.05);
  const back = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
  };
  for (const each of document.querySelectorAll("details")) each.open = true;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !element.checkVisibility() || element.tagName === "SCRIPT") continue;
    found.push([element.outerHTML.slice(0, 120), ratio(getComputedStyle(element).color, back(element))]);
  }
  for (const bar of document.querySelectorAll("i")) {
    if (!bar.checkVisibility()) continue;
    found.push([bar.outerHTML.slice(0, 120), ratio(getComputedStyle(bar).backgroundColor, back(bar.parentElement))]);
  }
  const card = getComputedStyle(document.querySelector("figure")).backgroundColor;
  const probe = document.body.appendChild(document.createElement("p"));
  for (const name of ["--soft", "--bad", ...[...Array(8).keys()].map((run) => `--run${run}`)]) {
    probe.style.color = `var(${name})`;  // the colors of the plots, which are painted on cards
    found.push([name, ratio(getComputedStyle(probe).color, card)]);
  }
  return found;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_and_bar_has_contrast(page: Page, tmp_path: Path, scheme: str) -> None:
    first, second = small_run(tmp_path / "first", rollout__truncated_share=0.5), small_run(tmp_path / "second")
    write_slow_trajectories(first)
    write_alarm(first, 20)
    page.prefer(scheme)
    page.open(report(tmp_path, first, second))
    found = page.evaluate(CONTRASTS)
    page.prefer("light")
    assert len(found) > 300 and any('class="wait1"' in what for what, _ in found)
    assert [each for each in found if each[1] < 4.5] == []


# The pixels in the color of the line, in a row near the upper edge of a plot and in that of its middle.
ROWS = """
(key) => {
  const canvas = document.querySelector(`[data-figure=${key}] canvas`);
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const row = (y) => [...Array(width).keys()].filter((x) => {
    const [red, , blue, alpha] = pixels.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
    return alpha > 200 && blue - red > 100;
  });
  return [row(20).length, row(Math.round(height / 2)).length];
}
"""


def test_an_outlier_is_a_triangle_at_the_edge_and_flattens_nothing(page: Page, tmp_path: Path) -> None:
    lines = [step_line(step, policy__grad_norm=1e6 if step == 30 else 0.3 + 0.01 * (step % 9)) for step in range(1, 81)]
    page.open(report(tmp_path, write_run(tmp_path / "run", lines)))
    edge, middle = page.evaluate(f"({ROWS})('grad')")
    assert edge >= 5 and middle > 10, "the line of all other steps crosses the middle again and again"


def test_legends_have_values_before_anything_is_pointed_at(page: Page, tmp_path: Path) -> None:
    page.open(report(tmp_path, small_run(tmp_path / "run")))
    values = page.evaluate(
        "[...document.querySelectorAll('.u-legend tr:not(.edge) .u-value')].map((e) => e.textContent)"
    )
    assert len(values) > 40 and not [each for each in values if each in ("", "–", "--")]


def test_an_alarm_is_a_line_in_the_plots(page: Page, tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    red = """
(() => {
  const { data } = (([c]) => c.getContext("2d").getImageData(0, 0, c.width, c.height))(
    document.querySelectorAll("[data-figure=lr] canvas"));
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.slice(at, at + 4);
    if (alpha > 100 && red > 150 && green < 80 && blue < 80) count += 1;
  }
  return count;
})()
"""
    page.open(report(tmp_path, run))
    assert page.evaluate(red) == 0
    write_alarm(run, 20)
    page.open(report(tmp_path, run))
    assert page.evaluate(red) > 50
    page.evaluate("document.querySelector('[data-axis=hours]').click()")
    assert page.evaluate(red) > 50


@pytest.mark.parametrize("width", [1280, 700, 480])
def test_the_navigation_wraps_and_covers_no_title(page: Page, tmp_path: Path, width: int) -> None:
    page.open(report(tmp_path, small_run(tmp_path / "run")))
    page.resize(width, 800)
    inside = page.evaluate(
        "[...document.querySelectorAll('nav a')].every((e) => e.getBoundingClientRect().right <= innerWidth"
        " && e.getBoundingClientRect().left >= 0)"
    )
    page.evaluate("location.hash = 'samples'")
    top = page.evaluate("document.querySelector('#samples h2').getBoundingClientRect().top")
    bar = page.evaluate("document.querySelector('nav').getBoundingClientRect().bottom")
    page.resize(1400, 1000)
    assert inside and top >= max(0, bar)


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
