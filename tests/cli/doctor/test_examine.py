"""`megarl doctor`: what it finds here, and when it says that a run cannot start."""

import json

import pytest

from megarl.cli import main
from megarl.cli.doctor import imports, machine, packages
from megarl.cli.doctor.report import Finding
from tests.support.checkout import ROOT


def test_doctor_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_start"] and report["device"] in ("cpu", "cuda")
    found = {finding["what"]: finding for finding in report["findings"]}
    assert {"device path", "ray", "megarl plugin for vLLM", "interfaces"} <= found.keys()
    # The imports of a run really happen.
    assert all(found[f"import {part}"]["detail"] == "works" for part in ("trainer", "engine", "pool"))
    # The lock files of this checkout are found, and compared with what is installed.
    assert not any("next to the package" in finding["detail"] for finding in report["findings"])


def test_doctor_fails_when_a_run_could_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda name: None if name == "ray" else real(name))
    monkeypatch.setattr(imports, "import_findings", lambda cuda: ())  # another test imports
    assert main.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "fail  ray" in text and "cannot start" in text


@pytest.mark.parametrize("problem", [None, "the program bwrap was not found: install the package bubblewrap"])
def test_doctor_warns_where_programs_cannot_be_sandboxed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str | None
) -> None:
    """A warning only where no config is named: most runs need no sandbox."""
    monkeypatch.setattr(machine, "sandbox_problem", lambda: problem)
    monkeypatch.setattr(imports, "import_findings", lambda cuda: ())
    assert main.main(["doctor", "--json"]) == 0
    (finding,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["what"] == "sandbox"]
    if problem is None:
        assert finding["level"] == "ok" and not finding["fix"]
    else:
        assert finding["level"] == "warn" and finding["detail"] == problem and "refuse to start" in finding["fix"]


@pytest.mark.parametrize(
    ("override", "user"),
    [
        ("reward.function=code", "reward.function: code"),
        ("tools=[{kind: python}]", "tools.0: python"),
        ("reward.function=gsm8k", None),
    ],
)
def test_doctor_fails_where_the_config_needs_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, user: str | None
) -> None:
    problem = "this machine forbids user namespaces: as root, run sysctl -w user.max_user_namespaces=10000"
    monkeypatch.setattr(machine, "sandbox_problem", lambda: problem)
    monkeypatch.setattr(imports, "import_findings", lambda cuda: ())
    given = ["doctor", "--json", "--config", str(ROOT / "examples/rl/configs/quickstart_cpu.yaml"), override]
    assert main.main(given) == (1 if user else 0)
    (finding,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["what"] == "sandbox"]
    assert finding["level"] == ("fail" if user else "warn") and finding["detail"] == problem
    if user:
        assert finding["fix"] == f"the config needs it: {user}"
        monkeypatch.setattr(machine, "sandbox_problem", lambda: None)
        assert main.main(given) == 0


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (["--installation", "--config", "x.yaml"], "drop one"),
        (["reward.function=code"], "add --config FILE"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_config_that_doctor_cannot_look_at(
    given: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", *given]) == 2
    assert reported in capsys.readouterr().err


def test_the_gpu_stack_on_a_login_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is compared with its own lock, and the user is not advised to install the CPU stack over it."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(imports, "import_findings", lambda cuda: ())
    assert main.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {finding["what"]: finding for finding in report["findings"]}
    assert "login node" in found["CUDA"]["fix"] and "against gpu.lock" in found
    assert not any(finding["fix"] == "run make setup" for finding in report["findings"])


def test_an_installation_is_examined_without_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make setup-gpu` asks for this, perhaps on a login node: that no GPU is there is no fault of the installation."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(imports, "import_findings", lambda cuda: [Finding("fail", "import trainer", "no module")])
    monkeypatch.setattr(packages, "package_findings", lambda cuda: [Finding("ok", "ray", "2.60.0")])
    assert main.main(["doctor", "--installation", "--json"]) == 1
    found = {finding["what"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert {"ray", "import trainer"} <= found and not {"CUDA", "device path", "interfaces", "threads"} & found
    monkeypatch.setattr(imports, "import_findings", lambda cuda: ())
    assert main.main(["doctor", "--installation"]) == 0
