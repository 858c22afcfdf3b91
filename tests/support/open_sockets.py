"""The listening sockets of a living run, as `megarl doctor --run` judges them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from megarl.cluster.handle import read_state
from megarl.commands.cli import main
from megarl.commands.doctor.listeners import Listener
from megarl.commands.doctor.run_sockets import find_listeners, find_roles, judge_run

ELSEWHERE = "192.0.2.77"  # an address that no run has


def check_sockets(run_dir: Path, expected: Set[str]) -> None:
    """No process of the living run, torchrun included, listens beyond loopback or for a purpose that is not known.

    The run is on this host alone, and names no address. `expected`: roles of which the run must have processes.
    """
    state = read_state(run_dir) or {}
    roles = find_roles(run_dir, state)
    found = find_listeners(roles)
    verdicts = judge_run(run_dir, state, found, roles)
    assert expected <= set(roles.values()), sorted(set(roles.values()))
    assert {"token", "curve", "loopback only"} <= {verdict.lock for verdict in verdicts}
    assert [verdict for verdict in verdicts if verdict.level != "ok"] == []
    assert [each for each in found if each.kind != "unix" and not each.is_loopback] == []
    for port in {each.lock: each.listener for each in verdicts if each.listener.kind != "unix"}.values():
        moved = [replace(each, host=ELSEWHERE) if each is port else each for each in found]
        left = [each.listener.port for each in judge_run(run_dir, state, moved, roles) if each.level == "fail"]
        assert left == [port.port], f"it is not found that {port} leaves loopback"
    for pid, role in roles.items():
        if role in {"trainer rank", "engine"} & expected:
            extra = Listener(pid, role, "TCP", "127.0.0.1", 1)
            failed = [each for each in judge_run(run_dir, state, [*found, extra], roles) if each.level == "fail"]
            assert [each.what for each in failed] == ["unknown"], f"one more socket of a {role} is not found"
    # What the user's command says is the same. It is called here, because a short run would end while it starts.
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(["doctor", "--run", str(run_dir)]) == 0, told.getvalue()
    assert "sockets are known and locked" in told.getvalue()
