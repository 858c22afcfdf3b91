"""Network findings: interfaces of this machine, and RDMA ports as Linux lists them."""

from pathlib import Path

import pytest

from megarl.cli.doctor import machine
from megarl.cli.doctor.machine import network_findings, rdma_ports


def write_port(root: Path, name: str, state: str) -> None:
    (root / name / "ports" / "1").mkdir(parents=True)
    (root / name / "ports" / "1" / "state").write_text(f"{state}\n")


def test_rdma_ports(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "4: ACTIVE")
    write_port(tmp_path, "mlx5_1", "1: DOWN")
    assert rdma_ports(tmp_path) == {"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN"}
    (finding,) = [each for each in network_findings(True, tmp_path) if each.what == "RDMA"]
    assert finding.level == "warn" and "skips mlx5_1:1" in finding.fix


def test_without_rdma_nccl_uses_tcp(tmp_path: Path) -> None:
    assert [each.what for each in network_findings(True, tmp_path) if "TCP" in each.detail] == ["RDMA"]
    assert not [each for each in network_findings(False, tmp_path) if each.what == "RDMA"]


def test_a_machine_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "interfaces", dict)
    (finding,) = network_findings(False, tmp_path)
    assert finding.level == "warn" and "cannot be one of several nodes" in finding.detail
