"""`megarl top`: what the screen says of runs of every kind, in every size, and how it ends."""

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from megarl.cli.main import main
from megarl.cli.top import screen_parts as sections
from megarl.cli.top.run_view import RunView, RunWatch
from megarl.cli.top.screen import Screen
from megarl.cli.top.screen_parts import ASCII_BLOCKS, bar, number, percent, sparkline, thinned
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.notices import write_notice
from megarl.common.rundir.run_files import ExitRecord, ask_to_stop, write_exit, write_start
from megarl.common.rundir.run_lock import Holder
from megarl.report.reading.run_directory import status_of
from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.trace.lines import FOLDER, SCHEMA, EventLine, Header
from tests.support.checkout import ROOT

DEAD = ProcessId(2**22 + 1, 1)


def row(step: int, **more: Any) -> dict[str, Any]:
    values = {
        "reward/mean": step / 100, "reward/accuracy": 0.5, "time/step": 2.0, "time/generate": 1.0, "time/drain": 0.0,
        "time/update": 0.5, "time/eta": 90.0, "rollout/idle_ratio": 0.25, "rollout/version_lag_mean": 1.5,
        "rollout/version_lag_max": 3.0, "rollout/queue_depth": 7.0, "rollout/kv_usage_max": 0.5,
        "perf/rollout_tokens_per_second": 12345.0, "perf/trainer_tokens_per_second": 6789.0,
        "rollout/replica_tokens_per_second/0": 2000.0, "rollout/replica_tokens_per_second/3": 400.0,
        "total/wall_seconds": 2.0 * step, "policy/approx_kl": 1e-4, "policy/grad_norm": 0.75, "policy/entropy": 0.5,
    }  # fmt: skip
    return {"step": step, "wall_time": time.time(), **values, **more}


def write_rows(run_dir: Path, *rows: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def write_events(run_dir: Path, process: str, stream: str, *lines: EventLine) -> None:
    (run_dir / FOLDER).mkdir(exist_ok=True)
    header = Header(SCHEMA, process, "host", 1, int(time.time() * 1e9), 0)
    path = run_dir / FOLDER / f"{process}.1700000000000.{stream}.000000.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (header, *lines)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 200 steps that has done 40 of them, and is alive."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("run:\n  name: small one\n  steps: 200\n")
    (tmp_path / "claim.json").write_bytes(msgspec.json.encode(Holder.here("a test", ProcessId.of(os.getpid()))))
    write_rows(tmp_path, *map(row, range(1, 41)))
    return tmp_path


def shown(view: RunView, width: int = 100, height: int = 40, *, live: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, highlight=False)
    console.print(Screen(view, live=live, height=height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_living_run_is_told_in_numbers(run_dir: Path) -> None:
    write_rows(run_dir, {"step": 40, "eval/held-out/greedy": 0.5, "eval/step": 30})
    write_rows(run_dir, {"step": 40, "eval/held-out/greedy": 0.625, "eval/held-out/greedy_low": 0.6,
                         "eval/held-out/greedy_high": 0.65, "eval/step": 40})  # fmt: skip
    write_notice(run_dir, "replica 3 is slow")
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert re.search(r"small one +running", text)
    assert re.search(r"step 40/200 20% .* eta 1m[23]\ds +ran 1m20s +2 s/step +last step \ds ago", text)
    assert re.search(r"reward +0\.4 +▁.*█", text) and re.search(r"accuracy +50%", text)
    assert "held-out greedy 62.5% [60, 65] +12.5 step 40" in text
    assert re.search(r"rollout +12\.3k tok/s", text) and re.search(r"trainer +6\.79k tok/s", text)
    assert "min 400 (replica 3), max 2k (0)" in text
    assert re.search(r"trainer +█+░+ idle 50%", text) and re.search(r"engines +█+░+ idle 25%", text)
    assert "generate 1s  update 0.5s" in text
    assert re.search(r"lag +1\.5 max 3", text) and re.search(r"queue +7 groups", text) and "at most 50%" in text
    assert re.search(r"\d\d:\d\d:\d\d replica 3 is slow", text)
    assert re.search(r"grad norm 0\.75", text) and "kl        1.00e-04" in text


def test_graded_scores_are_no_percentages(run_dir: Path) -> None:
    write_rows(run_dir, {"step": 40, "eval/a/greedy": 1.57, "eval/a/greedy_low": 1.48, "eval/a/greedy_high": 1.66,
                         "eval/step": 30, "eval/b/greedy": 0.5, "eval/b/graded": 1.0})  # fmt: skip
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert "a greedy 1.57 [1.48, 1.66] step 30" in text and "b greedy 0.5 step 30" in text


def test_graded_rewards_have_neither_accuracy_nor_right_groups(run_dir: Path) -> None:
    share = {"monitor/no_signal_share": 0.1875, "groups/solve_all": 1.0, "groups/solve_none": 0.0}
    write_rows(run_dir, row(41, **share))
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert "accuracy" in text and "groups    no signal 18.8%, right 100%, wrong 0%" in text
    write_rows(run_dir, row(42, **share, **{"reward/accuracy": None}), row(43, **share))
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert "accuracy" not in text and "right" not in text and "groups    no signal 18.8%" in text


def test_the_speed_of_rollout_is_that_of_many_steps(run_dir: Path) -> None:
    """In asynchronous training a step's tokens and the seconds of engines are not of the same responses."""
    for step in range(41, 81):
        seconds = 0.1 if step % 2 else 9.9
        write_rows(run_dir, row(step, **{"perf/rollout_tokens_per_second": 10_000 / seconds,
                                         "rollout/engine_seconds": seconds}))  # fmt: skip
    assert "rollout   2k tok/s" in "\n".join(shown(RunWatch(run_dir).look()))


def test_gpus_are_named_only_where_there_are_some_and_one_engine_is_no_range(run_dir: Path) -> None:
    config = "run: {name: n, steps: 99}\ntrainer: {gpus: 1}\nrollout: {replicas: 1, tensor_parallel: 1}\n"
    (run_dir / "config.yaml").write_text(config)
    write_rows(run_dir, row(41, **{"perf/tokens_per_second": 60.0, "perf/tokens_per_second_per_gpu": 30.0}))
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert "whole job 60 tok/s, 30 per GPU" in text and "min 400 (replica 3), max 2k (0)" in text
    write_start(run_dir, "cpu")
    (run_dir / "metrics.jsonl").unlink()
    one = {"perf/tokens_per_second": 60.0, "perf/tokens_per_second_per_gpu": 30.0}
    write_rows(run_dir, row(1, **one, **{"rollout/replica_tokens_per_second/3": None}))
    write_events(run_dir, "replica-0", "details", EventLine("load", 0, args={"kv_usage": 0.25}))
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert re.search("whole job 60 tok/s$", text, re.MULTILINE) and "GPU" not in text
    assert not re.search("engines +min", text) and re.search(r"KV cache  25%\s*$", text, re.MULTILINE)


def test_it_follows_the_run(run_dir: Path) -> None:
    watch = RunWatch(run_dir)
    assert watch.look().step == 40
    write_rows(run_dir, row(41, **{"reward/mean": 0.875}))
    write_notice(run_dir, "first")
    view = watch.look()
    assert view.step == 41 and view.value("reward/mean") == 0.875 and view.notices[-1][1] == "first"
    write_exit(run_dir, ExitRecord("failed", 41, "rank 1 died"))
    view = watch.look()
    assert (view.status, view.reason) == ("failed", "rank 1 died") and math.isnan(view.eta_s)
    assert "failed  rank 1 died" in "\n".join(shown(view))


def test_the_titles_of_the_report_s_advisories_are_one_line(run_dir: Path) -> None:
    watch = RunWatch(run_dir)
    (line,) = (each for each in shown(watch.look(), 200) if each.startswith("advice"))
    assert line == (
        "advice    The trainer waited for rollouts 50% of its time, over the newest 40 steps; "
        "1 of 2 engines made less than 50% of the usual tokens per second"
    )
    write_rows(run_dir, *(row(step, **{"rollout/aborted_share": 0.5}) for step in range(41, 81)))
    assert "50% of the responses were aborted over the newest 80 steps" in watch.look().advice
    calm = {"time/generate": 0.0, "rollout/replica_tokens_per_second/3": 2000.0}
    (run_dir / "metrics.jsonl").unlink()
    write_rows(run_dir, *(row(step, **calm) for step in range(1, 41)))
    assert not any(each.startswith("advice") for each in shown(watch.look()))


def test_faults_have_their_outcome_and_the_counts_of_the_metrics(run_dir: Path) -> None:
    def reported(name: str, at_s: int, text: str) -> EventLine:
        return EventLine(name, at_s * 1_000_000, replica=3, args={"kind": "engine", "text": text})

    events = [
        reported("fault", 1, "replica 3 died"),
        reported("recovery", 5, "it serves again"),
        reported("fault", 9, "gone"),
    ]
    write_events(run_dir, "controller", "rare", *events)
    write_rows(run_dir, row(41, **{"groups/failed": 2.0, "total/failed_writes": 5.0}))
    text = "\n".join(shown(RunWatch(run_dir).look(), 160))
    assert "engine: replica 3 died → it serves again after 4s" in text
    assert "engine: gone → no outcome so far" in text
    assert text.index("gone") < text.index("replica 3 died")  # the newest first
    assert "41 steps: 2 groups had fewer than two usable samples, 5 writes were refused by a disk or a service" in text


def test_engines_say_what_they_do_now_if_there_are_events(run_dir: Path) -> None:
    for index, (usage, running) in enumerate([(0.25, 10), (0.75, 30)]):
        args = {"running": running, "waiting": index, "kv_usage": usage}
        write_events(run_dir, f"replica-{index}", "details", EventLine("load", 0, args=args))
    watch = RunWatch(run_dir)
    text = "\n".join(shown(watch.look()))
    assert "25% (replica 0) to 75% (replica 1)" in text and "40 running, 1 waiting" in text
    view = watch.look()
    assert view.loads[1].kv_usage == 0.75  # the second look finds nothing new, and keeps it


def test_the_status_of_runs(run_dir: Path) -> None:
    claim = run_dir / "claim.json"
    assert status_of(run_dir, 1.0) == ("running", "")
    assert status_of(run_dir, math.nan)[0] == "starting"
    assert status_of(run_dir, 5000.0)[0] == "silent"
    ask_to_stop(run_dir, "the time limit")
    assert status_of(run_dir, 1.0) == ("running", "stops at the next step: the time limit")
    claim.write_bytes(msgspec.json.encode(Holder.here("a test", DEAD)))
    assert status_of(run_dir, 1.0)[0] == "ended"
    claim.write_bytes(msgspec.json.encode(replace(Holder.here("a test", DEAD), place="elsewhere")))
    assert status_of(run_dir, 1.0)[0] == "running"
    write_exit(run_dir, ExitRecord("preempted", 40, "the time limit"))
    assert status_of(run_dir, 1.0) == ("preempted", "the time limit")
    (run_dir / "exit.json").write_text("{")
    assert status_of(run_dir, 1.0)[0] == "unknown"


def test_eighty_columns_show_the_age_of_the_step_and_two_lines_of_advice(run_dir: Path) -> None:
    write_rows(run_dir, row(41, **{"total/wall_seconds": 90_000.0, "time/eta": 90_000.0, "time/step": 12.75}))
    _, second, *advice = shown(RunWatch(run_dir).look(), 80, 24)[:4]
    assert re.search(r"step 41/200 20.5% █+░+ eta 1d01h  ran 1d01h  12.8 s/step  last step \ds ago$", second)
    assert len(second) <= 80 and advice[0].startswith("advice    The trainer waited") and advice[1].startswith(" " * 10)
    assert "the newest 41 steps" in " ".join(map(str.strip, advice))


@pytest.mark.parametrize("size", [(100, 30), (200, 60), (96, 24), (80, 24), (60, 20), (40, 15), (24, 8), (10, 3)])
@pytest.mark.parametrize("live", [True, False])
def test_it_fits_every_terminal(run_dir: Path, size: tuple[int, int], live: bool) -> None:
    for index in range(30):
        write_notice(run_dir, f"{index} " + "a long notice with 漢字 " * 20)
    view = RunWatch(run_dir).look()
    lines = shown(view, *size, live=live)
    assert len(lines) <= size[1]
    console = Console(width=size[0])
    assert all(console.render_str(line, markup=False).cell_len <= size[0] for line in lines)
    assert lines[0].startswith("small one"[: size[0] - 1])
    if size[0] >= 60 and size[1] >= 20:
        assert any("reward" in line for line in lines) and any("notices" in line for line in lines)


def test_a_hundred_columns_and_thirty_lines_show_every_part(run_dir: Path) -> None:
    write_notice(run_dir, "one")
    text = "\n".join(shown(RunWatch(run_dir).look(), 100, 30, live=True))
    for title in ("reward", "evaluation", "update", "throughput", "waiting", "rollout", "faults", "notices"):
        assert f"── {title}" in text
    for name in ("KV cache", "queue", "lag", "engines", "entropy", "grad norm", "eta", "q or Ctrl-C"):
        assert name in text


def test_nothing_of_a_run_reaches_the_terminal_as_a_command(run_dir: Path) -> None:
    write_notice(run_dir, "red \x1b[31m bell \a [bold]markup[/bold]\nnext \r line")
    (run_dir / "config.yaml").write_text('run: {name: "x\\e[2Jy [red]", steps: 5}')
    write_exit(run_dir, ExitRecord("failed", 3, "\x1b]0;title\a"))
    text = "\n".join(shown(RunWatch(run_dir).look()))
    assert not set(text) & {"\x1b", "\a", "\r"} and "[bold]markup[/bold]" in text and "[red]" in text


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"step": 1}\n', b'{"step": 1, "wall_time": 5.0, "time/step": null}\n']
)
def test_a_run_with_nothing_to_show_yet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    lines = shown(RunWatch(tmp_path).look(), 100, 30)
    assert lines[0].startswith(tmp_path.name) and any("none so far" in line for line in lines)


def test_a_value_that_not_every_step_has_is_shown_with_its_age(run_dir: Path) -> None:
    write_rows(run_dir, row(41, **{"policy/entropy": None}), row(42, **{"policy/entropy": None}))
    assert any("entropy   0.5 (2 ago)" in line for line in shown(RunWatch(run_dir).look()))


def test_the_sections_name_declared_metrics() -> None:
    source = Path(sections.__file__).read_text() + Path(sections.__file__).with_name("run_view.py").read_text()
    found = set(re.findall(r'"((?:reward|groups|rollout|policy|mismatch|perf|time|sync|total)/[\w/]+)"', source))
    assert len(found) >= 20
    for name in found:
        REGISTRY.lookup(name.removesuffix("/") + ("/0" if name.endswith("/") else ""))


def test_without_a_terminal_one_frame_of_plain_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "small one" in text and "\x1b" not in text and max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("wrong", ["missing", "."])
def test_a_directory_without_a_run_is_one_message(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(tmp_path / wrong), "--once"]) == 2
    assert re.match(r"megarl: .*(no run directory|neither metrics)", capsys.readouterr().err)


def until(file: int, ready: Callable[[bytes], bool], seconds: float = 60) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while not ready(seen) and time.monotonic() < deadline:
        if select.select([file], [], [], 0.2)[0]:
            try:
                seen += os.read(file, 65536)
            except OSError:
                break
    assert ready(seen), seen[-2000:]
    return seen


@pytest.mark.parametrize("end", ["q", "ctrl-c", "sigterm"])
def test_it_ends_cleanly_and_leaves_the_terminal_as_it_was(run_dir: Path, end: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    before = termios.tcgetattr(theirs)
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]  # as a shell does for what it starts in the background
    process = subprocess.Popen(
        ["setsid", "--ctty", *ignoring, sys.executable, "-m", "megarl", "top", str(run_dir), "--interval", "0.2"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        first = until(ours, lambda seen: b"step 40/200" in seen)
        assert b"\x1b[?1049h" in first  # a screen of its own
        write_rows(run_dir, row(41))
        until(ours, lambda seen: b"step 41/200" in seen)
        if end == "sigterm":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(ours, b"q" if end == "q" else b"\x03")
        last = until(ours, lambda seen: b"\x1b[?1049l" in seen)
        assert b"Traceback" not in last
        assert process.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)
        os.close(theirs)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(1, 40))
@example([1e308, 1e308, -1e308], 2)
def test_sparklines_have_their_width_and_extremes(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) in (0, min(width, len(values)))
    assert len(thinned(values, width)) == min(width, len(values))
    assert (line == "") == (not any(map(math.isfinite, thinned(values, width))))


def test_charts() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█" and sparkline([1, 1], 8) == "▄▄"
    assert sparkline([0, math.nan, 1], 8) == "▁ █" and sparkline([0, 0, 4, 4], 2, ASCII_BLOCKS) == "_#"
    assert bar(0.5, 4) == "██░░" and bar(2.0, 3) == "███" and bar(math.nan, 2) == "░░"
    assert [percent(value) for value in (math.nan, 0.1234, 1.0, 0.0001)] == ["-", "12.3%", "100%", "0%"]
    assert [number(value, "time") for value in (math.nan, 90.0)] == ["-", "1m30s"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(row(1))), st.none() | st.floats(allow_nan=False), max_size=12),
    st.integers(8, 140), st.integers(3, 50),
)  # fmt: skip
def test_no_value_breaks_the_screen(values: dict[str, float | None], width: int, height: int) -> None:
    steps = [{**row(1), "wall_time": 5.0}, {**row(2), **values}]
    view = RunView("n", Path("n"), "running", "", 10, 10.0, steps)
    assert len(shown(view, width, height, live=True)) <= height
