"""The verdict on each listening socket of a run: known or not, locked or not, and what to do."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.commands.doctor.listeners import (
    KNOWN,
    LOOPBACK_FIX,
    Listener,
    all_locked,
    listeners_to_json,
    render_listeners,
    role_of,
)
from megarl.commands.doctor.listeners import judge as judge_all

MAPPED = "::ffff:127.0.0.1"
# A whole run on one host: role, kind, host -> what protects it.
ONE_HOST = (
    ("Ray's gcs_server", "TCP6", MAPPED, "token"),
    ("Ray's raylet", "TCP6", MAPPED, "token"),
    ("Ray's raylet", "TCP6", MAPPED, "token"),
    ("Ray's raylet", "unix", "/x/raylet", "file mode"),
    ("Ray's raylet", "unix", "/x/plasma_store", "file mode"),
    ("Ray's agents", "TCP", "127.0.0.1", "token"),
    ("supervisor", "TCP6", MAPPED, "token"),
    ("rollout controller", "TCP6", MAPPED, "token"),
    ("door", "TCP6", MAPPED, "token"),
    ("door", "TCP", "127.0.0.1", "token"),
    ("environment server", "unix", "/z/s", "file mode"),
    ("environment server", "TCP", "127.0.0.1", "token"),
    ("queue controller", "TCP6", MAPPED, "token"),
    ("queue controller", "TCP", "127.0.0.1", "curve"),
    ("queue controller", "TCP", "127.0.0.1", "curve"),
    ("queue storage", "TCP6", MAPPED, "token"),
    ("queue storage", "TCP", "127.0.0.1", "curve"),
    ("engine replica", "TCP6", MAPPED, "token"),
    ("engine replica", "unix", "/y/a", "file mode"),
    ("engine", "TCP", "127.0.0.1", "loopback only"),
    ("trainer rank", "TCP6", MAPPED, "token"),
    ("trainer rank", "TCP", "127.0.0.1", "loopback only"),
    ("torchrun", "TCP", "127.0.0.1", "hmac"),
)


UNLOCKED = dict.fromkeys(range(200), 3)  # sockets without a lock that each process may have
judge = partial(judge_all, unlocked=UNLOCKED)


def listeners(*rows: tuple[str, ...]) -> list[Listener]:
    """One process per role."""
    roles = sorted({row[0] for row in rows})
    return [
        Listener(100 + roles.index(role), role, kind, host, 0 if kind == "unix" else 5000 + index)  # type: ignore[arg-type]
        for index, (role, kind, host, *_) in enumerate(rows)
    ]


def test_the_endpoint_for_prometheus_is_told_from_gloo_by_process_and_port() -> None:
    mine, gloo = (Listener(100, "trainer rank", "TCP", "10.0.0.1", port) for port in (9400, 9401))
    other = Listener(101, "trainer rank", "TCP", "10.0.0.1", 9400)
    verdicts = judge([mine, gloo, other], ray_on_loopback=False, endpoint=(100, 9400))
    by_listener = {verdict.listener: verdict for verdict in verdicts}
    assert (by_listener[mine].what, by_listener[mine].lock) == ("Prometheus endpoint (HTTP)", "token")
    assert by_listener[mine].level == "ok"
    for listener in (gloo, other):
        assert by_listener[listener].lock == "none" and by_listener[listener].level == "warn"
    open_to_all = Listener(100, "trainer rank", "TCP", "0.0.0.0", 9400)
    (verdict,) = judge([open_to_all], ray_on_loopback=False, endpoint=(100, 9400))
    assert verdict.level == "fail" and "one address" in verdict.fix


def test_every_socket_of_a_run_on_one_host_is_known_and_locked() -> None:
    verdicts = judge(listeners(*ONE_HOST), ray_on_loopback=True)
    assert all_locked(verdicts) and {verdict.level for verdict in verdicts} == {"ok"}
    found = sorted((v.listener.role, v.listener.kind, v.listener.host, v.lock) for v in verdicts)
    assert found == sorted(ONE_HOST)


def test_on_several_hosts_the_network_protects_what_ray_and_collectives_leave_open() -> None:
    rows = [
        (role, kind, "::" if kind == "TCP6" else host.replace("127.0.0.1", "10.0.0.7"))
        for role, kind, host, _ in ONE_HOST
    ]
    verdicts = judge(listeners(*rows), ray_on_loopback=False)
    assert all_locked(verdicts)
    warned = [(v.listener.role, v.lock) for v in verdicts if v.level == "warn"]
    assert {lock for _, lock in warned} == {"token", "none"}
    assert {role for role, lock in warned if lock == "none"} == {"engine", "trainer rank"}
    assert all("network rule" in v.fix for v in verdicts if v.level == "warn")
    assert f"{len(rows)} sockets are known; the network must protect {len(warned)} of them" in render_listeners(
        verdicts
    )
    # With Ray on loopback, the same sockets are failures.
    assert not all_locked(judge(listeners(*rows), ray_on_loopback=True))


@pytest.mark.parametrize("row", sorted({row for row in ONE_HOST if row[1] != "unix"}))
def test_a_socket_of_a_run_on_one_host_that_is_not_on_loopback_fails_whatever_its_lock_is(row: tuple[str, ...]) -> None:
    role, kind, host, lock = row
    elsewhere = Listener(7, role, kind, host.replace("127.0.0.1", "10.0.0.7"), 5000)  # type: ignore[arg-type]
    judged = partial(judge_all, [elsewhere], unlocked={7: 1})
    (verdict,) = judged(ray_on_loopback=True)
    assert (verdict.level, verdict.fix) == ("fail", LOOPBACK_FIX) and not all_locked([verdict])
    assert verdict.lock == ("none" if lock == "loopback only" else lock)
    (verdict,) = judged(ray_on_loopback=True, chosen={7: {"10.0.0.8"}, 8: {"10.0.0.7"}})
    assert verdict.level == "fail", "the address of another process, or another address of this one, is not that"
    # As on several hosts, where it is the address of the node.
    level = "warn" if lock == "loopback only" else "ok"
    for (verdict,) in (judged(ray_on_loopback=False), judged(ray_on_loopback=True, chosen={7: {"10.0.0.7"}})):
        assert verdict.level == level
    (verdict,) = judge_all([Listener(7, role, "TCP", "0.0.0.0", 5000)], ray_on_loopback=True, unlocked={7: 1},
                           chosen={7: {"0.0.0.0"}})  # fmt: skip
    assert verdict.level == "fail", "all interfaces are nobody's choice"


@given(st.permutations(ONE_HOST), st.integers(0, len(ONE_HOST) - 1), st.booleans())
def test_one_more_socket_on_all_interfaces_always_fails(rows: list[tuple[str, ...]], index: int, several: bool) -> None:
    extra = (rows[index][0], "TCP", "0.0.0.0")
    verdicts = judge(listeners(*rows, extra), ray_on_loopback=not several)
    [failed] = [verdict for verdict in verdicts if verdict.level == "fail"]
    assert failed.listener.address.startswith("*:") and not all_locked(verdicts) and verdicts[0] is failed


@pytest.mark.parametrize("role", sorted(KNOWN))
def test_a_process_with_more_sockets_than_it_may_have_fails(role: str) -> None:
    """A trainer rank and an engine may have as many as was told of them; here 3."""
    most = sum(3 if known.most is None else known.most for known in KNOWN[role] if known.kind == "TCP")
    rows = [Listener(7, role, "TCP", "127.0.0.1", 5000 + port) for port in range(most + 1)]
    told = partial(judge, ray_on_loopback=True)
    verdicts = told(rows)
    assert [verdict.level for verdict in verdicts].count("fail") == 1 and verdicts[0].what == "unknown"
    assert all_locked(told(rows[:most]))
    # The number is that of each process, not of the role.
    others = [Listener(8, role, "TCP", "127.0.0.1", 6000 + port) for port in range(most)]
    assert all_locked(told([*rows[:most], *others]))


def test_a_process_that_is_not_of_a_run_fails() -> None:
    [verdict] = judge([Listener(7, "nc", "TCP", "127.0.0.1", 5000)], ray_on_loopback=True)
    assert (verdict.level, verdict.what, verdict.lock) == ("fail", "unknown", "none") and "KNOWN" in verdict.fix


@pytest.mark.parametrize("several", [False, True])
def test_torchs_own_store_fails_by_name_and_is_not_taken_for_ray(several: bool) -> None:
    """It listens on all interfaces, as Ray does between nodes, in processes of which one has a port of Ray's too."""
    ray = Listener(7, "trainer rank", "TCP6", "::" if several else MAPPED, 5001)
    stores = [Listener(7, "trainer rank", "TCP6", "::", 5002), Listener(8, "torchrun", "TCP6", "::", 5003)]
    verdicts = judge([*stores, ray], ray_on_loopback=not several)
    failed = [verdict for verdict in verdicts if verdict.level == "fail"]
    assert [verdict.what for verdict in failed] == ["torch's own store"] * 2
    assert all("start it with --rdzv-backend megarl" in verdict.fix for verdict in failed)


def test_a_unix_socket_that_other_users_may_use_fails() -> None:
    closed, opened = (Listener(7, "engine", "unix", f"/x/{name}", open_to_others=name == "b") for name in "ab")
    assert [v.level for v in judge([closed, opened], ray_on_loopback=True)] == ["fail", "ok"]


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.8.0.1", True, False),
        ("::1", True, False),
        (MAPPED, True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("::ffff:10.0.0.1", False, False),
        ("10.0.0.1", False, False),
    ],
)
def test_addresses(host: str, loopback: bool, wildcard: bool) -> None:
    listener = Listener(1, "engine", "TCP", host, 80)
    assert (listener.is_loopback, listener.is_wildcard) == (loopback, wildcard)
    assert listener.address == ("*:80" if wildcard else f"{host.removeprefix('::ffff:')}:80")


@pytest.mark.parametrize(
    ("command", "parent", "role"),
    [
        (["/lib/ray/core/src/ray/gcs/gcs_server", "--log_dir=x"], "supervisor", "Ray's gcs_server"),
        (["/lib/ray/core/src/ray/raylet/raylet", "--x"], "supervisor", "Ray's raylet"),
        (["ray::TransferQueueController", "", ""], "Ray's raylet", "queue controller"),
        (["ray::EngineReplica.generate", ""], "Ray's raylet", "engine replica"),
        (["ray::SimpleStorageUnit.get_zmq_server_info()"], "Ray's raylet", "queue storage"),
        (["ray::IDLE", ""], "Ray's raylet", "idle Ray worker"),
        (["ray::Stranger"], "Ray's raylet", "ray::Stranger"),
        (["VLLM::EngineCore    "], "engine replica", "engine"),
        (["VLLM::Worker_TP1"], "engine", "engine"),
        (["/bin/python", "-c", "from multiprocessing.spawn import spawn_main"], "engine replica", "engine"),
        (["/bin/python", "-m", "megarl.cluster.supervisor", "spec.json"], "trainer rank", "supervisor"),
        (["/bin/python", "-m", "torch.distributed.run", "--nproc-per-node", "2"], "", "torchrun"),
        (["/bin/python", "-m", "megarl.cluster.nodes.torchrun", "--nnodes", "2"], "node agent", "torchrun"),
        (["/bin/python", "/bin/torchrun", "--nproc-per-node", "2"], "", "torchrun"),
        (["/bin/python", "-u", "train_rl.py"], "torchrun", "trainer rank"),
        (["/bin/python", "-m", "megarl.rewards.worker", "48"], "rollout controller", "reward worker"),
        (
            ["/e/bin/python", "-P", "/m/megarl/environments/server_program.py"],
            "rollout controller",
            "environment server",
        ),
        (["/bin/sh", "-c", "a program of the environment"], "environment server", "environment server"),
        (["/usr/bin/nc", "-l", "80"], "rollout controller", "nc"),
        ([], "", "?"),
    ],
)
def test_roles(command: list[str], parent: str, role: str) -> None:
    assert role_of(command, parent) == role


def test_whoever_started_the_pool_is_the_launcher_unless_it_has_a_role() -> None:
    assert role_of(["python", "evaluate.py"], "", is_launcher=True) == "launcher"
    assert role_of(["python", "-m", "torch.distributed.run"], "", is_launcher=True) == "torchrun"


def test_the_table_and_its_json() -> None:
    good = listeners(*ONE_HOST)
    text = render_listeners(judge(good, ray_on_loopback=True))
    assert text.splitlines()[0].split() == ["state", "process", "pid", "address", "what", "lock"]
    assert text.endswith(f"\n{len(good)} sockets are known and locked\n") and "->" not in text
    bad = judge([*good, Listener(9, "nc", "TCP", "0.0.0.0", 81)], ray_on_loopback=True)
    text = render_listeners(bad)
    assert text.splitlines()[1].split()[:4] == ["fail", "nc", "9", "*:81"]
    assert "\n*:81\n  -> find out what opened it" in text
    assert text.endswith(f"\n1 of {len(good) + 1} sockets are not locked\n")
    content = json.loads(listeners_to_json(bad))
    assert content["locked"] is False and content["sockets"][0]["address"] == "*:81"
    assert content["sockets"][0]["listener"]["role"] == "nc"


def test_a_process_of_which_nothing_is_told_may_have_no_socket_without_a_lock() -> None:
    for role in ("trainer rank", "engine"):
        [verdict] = judge_all([Listener(7, role, "TCP", "127.0.0.1", 5000)], ray_on_loopback=True, unlocked={8: 9})
        assert (verdict.level, verdict.what) == ("fail", "unknown") and "unlocked_sockets.py" in verdict.fix
