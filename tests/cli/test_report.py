"""`megarl report` as a user calls it: mistakes, living runs, damaged files, and a run of 100,000 steps."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.schema.job import TelemetryConfig
from megarl.report.reading.samples_file import read_samples
from megarl.telemetry.trace.lines import EventLine
from tests.support.checkout import ROOT
from tests.support.telemetry.reported_events import write_alarm, write_events, write_full_events
from tests.support.telemetry.reported_runs import (
    CONFIG,
    START,
    evaluation_line,
    sample_line,
    small_run,
    step_line,
    write_long_run,
    write_run,
)


def test_the_page_is_one_file_in_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    before = {path.name for path in run.iterdir()}
    assert main.main(["report", str(run)]) == 0
    out = run / "report.html"
    assert capsys.readouterr().out == f"{out}\n" and {path.name for path in run.iterdir()} == before | {"report.html"}
    page = out.read_text()
    markup = page.split("<script")[0]
    assert page.count("<script") == 3 and "default-src &#x27;none&#x27;" in markup
    assert not any(each in markup for each in ("src=", "<link", "url(", "@import")), "nothing may be loaded"
    assert "25.0%" in page and "75.0%" in page


def test_mistakes_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    mistakes = {
        "there is no run directory": [str(tmp_path / "absent")],
        "neither metrics.jsonl nor config.yaml": [str(run), str(tmp_path / "empty")],
        "9 runs given; at most 8": [str(run)] * 9,
        "cannot be written": [str(run), "--out", str(tmp_path / "absent" / "page.html")],
    }
    for message, arguments in mistakes.items():
        assert main.main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_a_living_run_with_torn_and_damaged_files_is_reported(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=30)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\x00\x00garbage\n" + json.dumps(step_line(31)).encode()[:99])
    (run / "config.yaml").write_text("run: {steps: 200\n")
    (run / "logs").mkdir()
    (run / "logs" / "notices.jsonl").write_text('{"text": "an engine is lost", "wall_time": 1795600000.5}\n{"tex')
    (run / "events").mkdir()
    (run / "events" / "controller.1795600000000.rare.000000.jsonl").write_text('{"schema": 1, "pro')
    assert main.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert 'class="status running"' in page and "step 30" in page
    assert "an engine is lost" in page and "2026-11-25" in page


def test_the_page_says_what_its_plots_leave_out(tmp_path: Path) -> None:
    sets = [evaluation_line(0, 0.5, f"set-{number}") for number in range(6)]
    run = write_run(tmp_path / "crowded", [*sets, step_line(1)])
    assert main.main(["report", str(run)]) == 0
    assert "Not in the plots: evaluation sets set-4, set-5." in (run / "report.html").read_text()
    plain = small_run(tmp_path / "plain")
    assert main.main(["report", str(plain)]) == 0
    assert "Not in the plots" not in (plain / "report.html").read_text()


def test_alarms_stand_first_one_box_for_each_rule(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", rollout__truncated_share=0.5)
    write_alarm(run, *range(11, 33, 2))
    write_events(run, "rare", [EventLine("fault", 10, 0, 3, args={"kind": "engine", "text": "replica 0 is lost"})])
    assert main.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    main_part = page[page.index("<main>") :]
    assert main_part.index('data-alarm="ess"') < main_part.index('data-advisory="truncated"')
    assert page.count("data-alarm=") == 1
    assert "<b>ess in steps 17, 19, 21, 23, 25, 27, 29, 31 and 3 before</b>" in page
    assert "<p>0.0134 is below 0.3 for 3 steps (docs/observability/monitor.md#ess); it has not ended</p>" in page
    table = page[page.index('class="table faults"') : page.index('id="samples"')]
    assert "replica 0 is lost" in table and "0.0134" not in table, "alarms are not faults a second time"
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["alarms"] == [[0, step, "ess"] for step in range(11, 33, 2)]
    plain = small_run(tmp_path / "plain")
    assert main.main(["report", str(plain)]) == 0
    assert "data-alarm" not in (plain / "report.html").read_text()


def test_an_alarm_that_a_resume_has_discarded_is_not_shown(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    args = {"kind": "alarm", "rule": "ess", "text": "alarm ess: 0.0134 is below 0.3"}
    rolled = EventLine("rolled_back", 500_000_000, 0, 5, args={"since": START})
    write_events(run, "rare", [EventLine("fault", 200_000_000, 0, 20, args=args), rolled], "trainer-rank-0")
    assert main.main(["report", str(run)]) == 0
    assert "data-alarm" not in (run / "report.html").read_text()


def test_the_page_says_what_was_run_and_where(tmp_path: Path) -> None:
    config = CONFIG | {"model": {"path": "models/<tiny>"}}
    run = write_run(tmp_path / "run", [step_line(1)], config=config)
    assert main.main(["report", str(run)]) == 0
    assert "model models/&lt;tiny&gt;</div>" in (run / "report.html").read_text()
    start = {"version": "0.1.0", "commit": "0123456789ab-dirty", "host": "node-7", "device": "NVIDIA H200"}
    (run / "start.json").write_text(json.dumps(start))
    assert main.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "models/&lt;tiny&gt; · megarl 0.1.0 at commit 0123456789ab-dirty · NVIDIA H200 on node-7" in page
    folded = page[page.index("<summary>All 9 values of run</summary>") :]
    assert '<th scope="row">trainer.parallel.tensor</th><td>2</td>' in folded


def test_what_is_0_throughout_is_a_word_and_no_plot(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", rollout__truncated_share=0.0, rollout__queue_depth=0.0)
    assert main.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "0 in all steps: Cut at the limit, or aborted." in page and "0 in all steps: Queue depth." in page
    assert 'data-figure="truncated"' not in page and 'data-figure="depth"' not in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert not {"truncated", "depth"} & {figure["key"] for figure in data["figures"]}


def test_samples_are_folded_and_stand_after_the_faults(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    assert main.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    shown, folded = page[page.index('id="samples"') :].split("<summary>42 more</summary>")
    assert shown.count("<summary>") == 6 and folded.count("<span>step ") == 42
    assert page.index('id="faults"') < page.index('id="samples"')


def test_how_a_run_ended_is_reported(tmp_path: Path) -> None:
    record = {"status": "failed", "step": 40, "reason": "the disk <is> full"}
    for content, status in ((json.dumps(record), "failed"), ('{"status": "fin', "unknown")):
        run = small_run(tmp_path / status)
        (run / "exit.json").write_text(content)
        assert main.main(["report", str(run)]) == 0
        assert f'class="status {status}"' in (run / "report.html").read_text()
    assert "the disk &lt;is&gt; full" in (tmp_path / "failed" / "report.html").read_text()
    silent = small_run(tmp_path / "silent")
    os.utime(silent / "metrics.jsonl", (1_700_000_000, 1_700_000_000))
    assert main.main(["report", str(silent)]) == 0
    assert 'class="status silent"' in (silent / "report.html").read_text()


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    (run / "samples.jsonl").unlink()
    assert main.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "step 0 of 200" in (tmp_path / "page.html").read_text()


@pytest.mark.slow  # files of 370 MB are written first
def test_100_000_steps_are_reported_within_10_s_10_mb_and_bounded_memory(tmp_path: Path) -> None:
    """Seconds of processor time, because the tests share their machine; starting Python is part of them.

    The folder of events has as much of what the report reads as the default config keeps.
    """
    run = write_long_run(tmp_path / "run", 100_000, peak_at=54_321)
    assert write_full_events(run, int(TelemetryConfig().events_mib) << 20) > 40e6
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    script = (
        "import re, sys; from megarl.cli.main import main; status = main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(run), "--out", str(tmp_path / "page.html")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    page = (tmp_path / "page.html").read_bytes()
    memory = int(done.stdout.split()[-1])
    print(f"{wall:.1f} s, {seconds:.1f} s of processor time, {len(page) / 1e6:.2f} MB, {memory >> 10} MiB of memory")
    assert len(page) < 10e6 and seconds < 10, (len(page), seconds)
    assert memory < 300 << 10, "KiB of memory"
    data = json.loads(page.split(b'id="data">')[1].split(b"</script>")[0])
    (reward,) = (figure["lines"][0] for figure in data["figures"] if figure["key"] == "grad")
    assert len(reward["y"]) <= 800
    assert b">engine 499<" in page and page.count(b"500 tokens in 2 turns") == 20, "events are read to their ends"
    depth = next(figure["lines"][0] for figure in data["figures"] if figure["key"] == "step")
    assert min(depth["low"]) == 9 and max(depth["high"]) == 11
    assert (run / "metrics.jsonl").stat().st_size > 300e6, "lines are as long as those of a real run"


def test_demonstrations_are_shown_as_such_and_are_no_lowest_rewards(tmp_path: Path) -> None:
    """They have no reward: a line of samples.jsonl says 0.0 there."""
    lines = [sample_line(step, 1, reward=1.0) for step in range(1, 401)]
    lines += [sample_line(401, index, reward=0.0, demonstrated=True, response="shown") for index in range(2)]
    run_dir = write_run(tmp_path / "run", [step_line(step) for step in range(1, 402)], lines)
    found = read_samples(run_dir, 6)
    assert [place.reward for place in found.places[-3:]] == [1.0, None, None]
    assert main.main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "<b>demonstration</b>" in page and "<b>reward 0</b>" not in page and "<b>reward 1</b>" in page
