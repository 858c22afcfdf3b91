"""launch/local.sh: two runs at once on one machine, one of them ended by SIGTERM."""

import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.pool.leftovers import assert_nothing_left, marked, survivors
from tests.support.runs.jobs import check_steps, exit_record, wait_for, write_job
from tests.support.runs.run import step_records

pytestmark = pytest.mark.cluster


def start(config: Path) -> subprocess.Popen[bytes]:
    with config.with_name("job.log").open("wb") as output:
        return subprocess.Popen(
            ["launch/local.sh", str(config)], cwd=ROOT, env=marked(config.parent / "run"), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    """One runs to its end while the other, which would go on forever, is asked to stop: each does only its own."""
    short = write_job(tmp_path / "short", steps=4)
    long = write_job(tmp_path / "long", steps=100_000)
    dirs = [path.parent / "run" for path in (short, long)]
    processes = [start(short), start(long)]
    try:
        assert processes[0].wait(timeout=400) == 0, short.with_name("job.log").read_text()[-4000:]
        wait_for(lambda: len(step_records(dirs[1])) > 0, 200, "the other run's first step", long.with_name("job.log"))
        # A second start in a directory that is in use is refused, and harms nobody.
        again = subprocess.run(["launch/local.sh", str(long)], cwd=ROOT, env=environment(), capture_output=True,
                               text=True, timeout=120, check=False)  # fmt: skip
        assert again.returncode == 2 and "is in use by megarl launch" in again.stderr, again.stderr
        steps = len(step_records(dirs[1]))
        # To torchrun itself: its ranks get it too, and time to end their step.
        (torchrun,) = [p for p in survivors(dirs[1]) if "megarl.cluster.torchrun.run" in p.cmdline()]
        torchrun.terminate()
        assert processes[1].wait(timeout=600) == 0, long.with_name("job.log").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    finished, stopped = (exit_record(path) for path in dirs)
    assert (finished["status"], finished["step"]) == ("finished", 4)
    assert stopped["status"] == "preempted" and stopped["reason"] == "SIGTERM" and stopped["step"] >= steps
    check_steps(dirs[0], 4)
    check_steps(dirs[1], stopped["step"])
    for path in dirs:
        assert_nothing_left(path)
