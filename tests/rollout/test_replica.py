"""An engine that cannot start: its own error, out of its log."""

from __future__ import annotations

from pathlib import Path

from megarl.rollout.replica import root_cause


def test_the_engines_own_error_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1509] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1510] rust.SafetensorError: invalid header length\n"
        "2026-11-21 01:26:22 ERROR megarl.rollout.replica: RuntimeError: Engine core initialization failed. See above\n"
    )
    assert root_cause(log) == "rust.SafetensorError: invalid header length"
    assert root_cause(log, start=log.stat().st_size) == ""
    log.write_text("(EngineCore pid=7) INFO 11-21 01:26:19 [core.py:1] no Error: here\n")
    assert root_cause(log) == ""
