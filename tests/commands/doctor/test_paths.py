"""`megarl doctor --nodes` without processes: which paths are tried, what the table says, and which fix is named."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from megarl.commands.doctor.paths import (
    MemberFacts,
    Outcome,
    PathResult,
    PathToTry,
    advice,
    all_required_work,
    node_leaders,
    plan_paths,
    render_paths,
    to_json,
)


def member(host: str, *interfaces: str, cuda: bool = False, rdma: bool = False, route: str = "eth0") -> MemberFacts:
    return MemberFacts(host, {name: "10.0.0.1" for name in interfaces or ("eth0",)}, route, cuda, rdma)


def names(paths: list[PathToTry]) -> list[tuple[str, bool]]:
    return [(path.name, path.required) for path in paths]


def test_a_cpu_run_uses_gloo_on_its_route_and_other_shared_interfaces_are_tried() -> None:
    members = [member("a", "eth0", "ib0", "only-a"), member("b", "eth0", "ib0")]
    assert names(plan_paths(members, configured=False)) == [("gloo on eth0", True), ("gloo on ib0", False)]


def test_the_name_of_the_interface_may_differ_between_nodes() -> None:
    first, *rest = plan_paths([member("a", "x", route="x"), member("b", "y", route="y")], configured=False)
    assert first.name == "gloo on x/y" and not rest
    assert [each["GLOO_SOCKET_IFNAME"] for each in first.environment] == ["x", "y"]


@pytest.mark.parametrize("configured", [False, True])
def test_gpus_add_nccl_and_rdma_adds_tcp(configured: bool) -> None:
    members = [member(host, cuda=True, rdma=True) for host in "ab"]
    paths = {path.name: path for path in plan_paths(members, configured=configured)}
    assert list(paths) == ["gloo on eth0", "NCCL as it chooses", "NCCL over TCP on eth0"]
    chosen = {"NCCL_SOCKET_IFNAME": "eth0"} if configured else {}
    assert paths["NCCL as it chooses"].environment == (chosen, chosen)
    assert paths["NCCL over TCP on eth0"].environment[0] == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert "NCCL over TCP on eth0" not in [
        path.name for path in plan_paths([member("a", cuda=True), member("b", cuda=True)], configured=False)
    ]


def test_one_leader_per_node() -> None:
    assert node_leaders([member(host) for host in ("a", "a", "b", "c", "b")]) == [0, 2, 3]


def result(*outcomes: Outcome, required: bool = True, backend: str = "gloo") -> PathResult:
    return PathResult(PathToTry("gloo on eth0", backend, ({}, {}), required), outcomes)  # type: ignore[arg-type]


WORKS = Outcome({"all-reduce": 2.0}, "end")
BROKEN = Outcome({}, "connect", "no end within 5 s")


def test_the_slowest_rank_counts() -> None:
    slow = Outcome({"all-reduce": 0.5, "all-reduce of nodes 0 and 1": 1.0}, "end")
    assert result(WORKS, slow).slowest() == {"all-reduce": 0.5, "all-reduce of nodes 0 and 1": 1.0}
    text = render_paths([member("a"), member("b")], [result(WORKS, slow)])
    assert "0.500" in text and "2.000" not in text and "can run together" in text


def test_one_node_says_nothing_of_the_paths_between_nodes() -> None:
    text = render_paths([member("a"), member("a")], [result(WORKS, WORKS)])
    assert "start one on every node" in text and "can run together" not in text


def test_a_path_that_a_run_uses_fails_the_command_and_another_one_does_not() -> None:
    members = [member("node-a"), member("node-b")]
    needed, other = result(WORKS, BROKEN), result(WORKS, BROKEN, required=False)
    assert not all_required_work([needed]) and all_required_work([result(WORKS, WORKS), other])
    text = render_paths(members, [needed])
    assert "node-b at connect: no end within 5 s" in text and "firewall" in text and "cannot run together" in text
    assert "warn" in render_paths(members, [result(WORKS, WORKS), other])
    content = json.loads(to_json(members, [needed, other]))
    assert not content["can_start"] and [path["ok"] for path in content["paths"]] == [False, False]
    assert all(path["fix"] for path in content["paths"])


@pytest.mark.parametrize(
    ("log", "stage", "backend", "told"),
    [
        ("RuntimeError: [enforce fail] Unable to find address for: ib9", "connect", "gloo", "not on every node"),
        ("Connection timed out", "connect", "gloo", "firewall"),
        ("NET/IB : Call to ibv_reg_mr failed: Cannot allocate memory", "all-reduce", "nccl", "ulimit -l unlimited"),
        ("NET/IB: Got completion from peer with status=12", "all-reduce", "nccl", "NCCL_IB_HCA"),
        ("Duplicate GPU detected : rank 1 and rank 0", "connect", "nccl", "share a GPU"),
        ("Bootstrap : no socket interface found", "connect", "nccl", "not on every node"),
        ("Connection reset by peer", "broadcast from node 1", "gloo", "MTU"),
    ],
)
def test_the_fix_of_each_failure(log: str, stage: str, backend: str, told: str) -> None:
    broken = result(WORKS, Outcome({}, stage, log.splitlines()[-1], log), backend=backend)
    assert told in advice(broken.path, broken.outcomes)


def test_outcomes_travel_as_json() -> None:
    for outcome in (BROKEN, WORKS):
        assert Outcome(**json.loads(json.dumps(asdict(outcome)))) == outcome
