"""The output of a process goes to its log, as far as the disk takes it; a log that is large is begun again."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.checkout import environment

PRINTS = """
import contextlib, logging, os, sys
from pathlib import Path
from megarl.common.process import output
output.RotatingLog.__init__.__defaults__ = (1000,)
terminal = output.redirect_output(Path(sys.argv[1]))
for number in range(100):
    print("printed", number)
    logging.warning("logged %d", number)
with contextlib.suppress(OSError):
    os.write(2, b"written by a library\\n")
terminal.write("for the user\\n")
"""


def run(log: Path, program: str = PRINTS, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", program, str(log)], env=environment(), text=True, capture_output=True, timeout=60,
        check=True, **options,
    )  # fmt: skip


def test_a_log_is_begun_again_when_it_is_large(tmp_path: Path) -> None:
    ended = run(tmp_path / "logs" / "rank.log")
    assert ended.stderr == "for the user\n" and ended.stdout == ""
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank.log", "rank.log.1"]
    assert all((tmp_path / "logs" / name).stat().st_size < 1200 for name in files)
    assert "written by a library" in (tmp_path / "logs" / "rank.log").read_text()


CHILD_WRITES_ON = """
import subprocess, sys
from pathlib import Path
from megarl.common.process import output
output.RotatingLog.__init__.__defaults__ = (1000,)
output.redirect_output(Path(sys.argv[1]))
child = subprocess.Popen(["sh", "-c", "read line; echo the child goes on"], stdin=subprocess.PIPE)
for number in range(60):
    print("printed", number, "." * 20)
child.communicate(b"go\\n", timeout=30)
"""


def test_a_child_writes_to_the_log_that_was_begun_again(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    run(log, CHILD_WRITES_ON)
    assert log.with_name("rank.log.1").exists()
    assert log.read_text().endswith("printed 59 " + "." * 20 + "\nthe child goes on\n") and log.stat().st_size < 1200


CANNOT_COPY = """
import shutil, sys
from pathlib import Path
from megarl.common.process import output
tries = []
def full(*paths):
    tries.append(paths)
    raise OSError(28, "No space left on device")
shutil.copyfile = full
output.RotatingLog.__init__.__defaults__ = (1000,)
terminal = output.redirect_output(Path(sys.argv[1]))
for number in range(100):
    print("printed", "." * 31)
terminal.write(f"{len(tries)}\\n")
"""


def test_a_log_that_cannot_be_copied_is_written_on_and_copied_seldom(tmp_path: Path) -> None:
    ended = run(tmp_path / "rank.log", CANNOT_COPY)
    assert (tmp_path / "rank.log").stat().st_size == 4000 and ended.stderr == "3\n"


def test_a_log_that_takes_no_more_bytes_ends_nothing(tmp_path: Path) -> None:
    """The kernel's limit on the size of a file stands for the full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    ended = run(tmp_path / "rank.log", preexec_fn=limit)
    assert ended.stderr == "for the user\n"
    assert (tmp_path / "rank.log").stat().st_size == 500
