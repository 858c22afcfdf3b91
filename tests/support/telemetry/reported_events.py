"""Event files for `megarl report`, in the form that `megarl.telemetry.trace.lines` declares."""

from pathlib import Path
from typing import Any

import msgspec

from megarl.telemetry.trace.lines import (
    CONTROLLER,
    FOLDER,
    SCHEMA,
    EventFileName,
    EventLine,
    Header,
    rank_process,
    replica_process,
)
from megarl.telemetry.trace.writer import SHARES
from tests.support.telemetry.reported_runs import START


def write_events(run_dir: Path, stream: Any, events: list[EventLine], process: str = "controller") -> None:
    """Write one file of events, whose times are in microseconds from `START`."""
    (run_dir / FOLDER).mkdir(exist_ok=True)
    header = Header(SCHEMA, process, "host", 1, int(START * 1e9), 0)
    lines = [msgspec.json.encode(each) for each in (header, *events)]
    EventFileName(process, 1_795_600_000_000, stream, 0).path(run_dir).write_bytes(b"\n".join(lines) + b"\n")


def slow(step: int, seconds: float, *, group: int = 1, **parts: float) -> EventLine:
    """A slow trajectory; `parts`: seconds by cause."""
    args: dict[str, Any] = {"turns": 2, "tokens": 500} | {f"{cause}_s": value for cause, value in parts.items()}
    return EventLine("slow_trajectory", 0, int(seconds * 1e6), step, None, group, 0, 1, args)


def write_slow_trajectories(run_dir: Path) -> None:
    """Two slow trajectories, one of which waited for a tool."""
    events = [slow(3, 20.0, decode=12.0, tool=6.0, queue=2.0), slow(4, 30.0, group=2, tool=25.0, decode=5.0)]
    write_events(run_dir, "steps", events)


def write_alarm(run_dir: Path, *steps: int, rule: str = "ess") -> None:
    """Alarms of a rule that begin in these steps; each ends 15 s later, but for the last one."""
    text = f"alarm {rule}: 0.0134 is below 0.3 for 3 steps (docs/observability/monitor.md#{rule})"
    args = {"kind": "alarm", "rule": rule}
    begins = [EventLine("fault", 10_000_000 * step, 0, step, args=args | {"text": text}) for step in steps]
    ends = [
        EventLine("recovery", 10_000_000 * step + 15_000_000, 0, step + 1, args=args | {"text": "its value recovered"})
        for step in steps[:-1]
    ]
    write_events(run_dir, "rare", [*begins, *ends], "trainer-rank-0")


def write_full_events(run_dir: Path, most_bytes: int) -> int:
    """Write as many events of steps as each process keeps, and 500 faults with recoveries; return the bytes.

    The run has 2 ranks and 2 replicas: phases of ranks, publications in replicas, and slow
    trajectories. Lines are made once, and only the step is put into them.
    """
    phases = [
        EventLine(name, 123_456_789_000, 1_234_567, 77_777) for name in ("generate", "logprobs", "update", "step")
    ]
    loads = [EventLine(name, 123_456_789_000, 1_234_567, version=77_777) for name in ("paused", "load_weights")]
    parts = {"queue": 0.125, "prefill": 0.25, "decode": 12.125, "tool": 6.5, "reward": 0.25, "other": 0.125}
    slowest = [slow(77_777, 19.375, group=77_777, **parts)] * 3
    slowest.append(EventLine("batch_taken", 123_456_789_000, step=77_777, args={"groups": 32, "in_flight": 64}))
    lines = {rank_process(0): phases, rank_process(1): phases, replica_process(0): loads, replica_process(1): loads}
    for process, events in (lines | {CONTROLLER: slowest}).items():
        text = b"".join(msgspec.json.encode(each) + b"\n" for each in events)
        count = int(most_bytes * SHARES["steps"]) // len(text)
        write_events(run_dir, "steps", [], process)
        with EventFileName(process, 1_795_600_000_000, "steps", 0).path(run_dir).open("ab") as file:
            for start in range(0, count, 1000):
                steps = range(start, min(start + 1000, count))
                file.write(b"".join(text.replace(b"77777", b"%d" % (step + 1)) for step in steps))
    faults = [
        EventLine(name, 1_000_000 * number + after, replica=0, args={"kind": "engine", "text": f"engine {number}"})
        for number in range(500)
        for name, after in (("fault", 0), ("recovery", 500_000))
    ]
    write_events(run_dir, "rare", faults)
    return sum(path.stat().st_size for path in (run_dir / FOLDER).iterdir())
