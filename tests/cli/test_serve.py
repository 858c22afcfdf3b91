"""`megarl serve`: options, refusals, the dry run, and a whole server from its start to Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from megarl.cli.main import build_parser, main
from megarl.cli.serve import serve_config
from megarl.common.process.processes import descendants, is_alive
from tests.support.checkout import ROOT
from tests.support.waiting import wait_until


def test_options_and_overrides_become_a_config_that_only_serves(model: Path, tmp_path: Path) -> None:
    options = build_parser().parse_args([
        "serve", "--model", str(model), "--replicas", "3", "--port", "8123", "--max-model-len", "99",
        "--run-dir", str(tmp_path), "reward.workers=5", "timeouts.rpc_s=7",
    ])  # fmt: skip
    config = serve_config(options)
    assert (config.rollout.replicas, config.rollout.max_model_len, config.trainer.precision) == (3, 99, "fp32")
    assert config.gateway.enabled and (config.gateway.port, config.reward.workers) == (8123, 5)
    assert config.rollout.load_weights and config.timeouts.rpc_s == 7 and config.run_dir == tmp_path


def test_the_engines_of_a_runs_config_are_taken(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({
        "run": {"steps": 5, "deterministic": True}, "model": {"path": "elsewhere"}, "sampling": {"max_tokens": 4},
        "batch": {"groups": 1, "samples_per_group": 2}, "data": {"path": "nowhere.jsonl"},
        "rollout": {"replicas": 2, "max_num_seqs": 17}, "gateway": {"image_hosts": ["a.example"]},
    }))  # fmt: skip
    config = serve_config(build_parser().parse_args(["serve", "--model", str(model), "--config", str(file)]))
    assert (config.rollout.replicas, config.rollout.max_num_seqs, config.gateway.image_hosts) == (2, 17, ("a.example",))
    assert config.model.path == model and config.rollout.load_weights and not config.run.deterministic


def test_the_dry_run_starts_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(model), "--dry-run", "--run-dir", str(tmp_path / "x")]) == 0
    shown = capsys.readouterr().out
    assert str(model) in shown and "512 tokens" in shown and "nothing was started" in shown
    assert not (tmp_path / "x").exists()


def test_mistakes_are_reported_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o644)
    wrong = {
        "--model": ["--model", str(tmp_path)],
        "--token-file": ["--model", str(model), "--token-file", str(token)],
        "--max-model-len": ["--model", str(model), "--max-model-len", "100000"],
        "gateway.host": ["--model", str(model), "--host", "0.0.0.0"],
        "gateway.prot": ["--model", str(model), "gateway.prot=1"],
    }
    for reported, arguments in wrong.items():
        assert main(["serve", *arguments, "--run-dir", str(tmp_path / "x")]) == 2
        assert reported in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_from_its_start_to_its_end(model: Path, tmp_path: Path) -> None:
    """An engine is killed meanwhile: another one is started, and the request that waited is answered."""
    token = tmp_path / "token"
    token.write_text("a-token-of-the-user's-own\n")
    token.chmod(0o600)
    run_dir, output = tmp_path / "run", tmp_path / "out.txt"
    command = [
        sys.executable, "-m", "megarl", "serve", "--model", str(model), "--run-dir", str(run_dir),
        "--token-file", str(token), "timeouts.engine_start_s=1200",
    ]  # fmt: skip
    with output.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT
        )
    try:
        wait_until(lambda: "curl " in output.read_text() or server.poll() is not None, 600, "the server to start")
        assert server.poll() is None, output.read_text()
        gateway = json.loads((run_dir / "gateway.json").read_text())
        assert gateway["token_file"] == str(token) and not (run_dir / "gateway_token").exists()
        headers = {"Authorization": "Bearer a-token-of-the-user's-own"}
        below = descendants(server.pid) | descendants(
            json.loads((run_dir / "supervisor.json").read_text())["process"]["pid"]
        )
        engines = [p for p in below if Path(f"/proc/{p.pid}/cmdline").read_text().startswith("ray::EngineReplica")]

        def ask() -> list[int]:
            body = {
                "token_ids": [5, 6, 7],
                "sampling_params": {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True},
            }
            answer = httpx.post(f"{gateway['url']}/inference/v1/generate", json=body, headers=headers, timeout=600)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])

        before = ask()
        assert len(engines) == 1
        os.kill(engines[0].pid, signal.SIGKILL)
        assert ask() == before
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0, output.read_text()
        wait_until(lambda: not any(is_alive(each) for each in below), 60, "every process to end")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait(60)
