"""The endpoint for Prometheus: names, access, bounds, and that no scrape holds a step up. Read by the real library."""

import io
import json
import math
import re
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from megarl.common.errors import ConfigError
from megarl.config.schema import Config
from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.metrics.registry import UndeclaredMetricError
from megarl.telemetry.sinks import prometheus, prometheus_names
from megarl.telemetry.sinks.prometheus import MOST_CLIENTS, PrometheusSink, ScrapeServer, check_endpoint, read_endpoint
from megarl.telemetry.sinks.sinks import MetricsWriter
from tests.support.trainer.configs import config
from tests.support.waiting import wait_until

VALUES = {"reward/mean": 0.5, "time/step": 2.5, "sync/bytes": 1728512.0, "policy/grad_norm": math.nan}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def chosen(tmp_path: Path) -> Config:
    return config("model", run__dir=str(tmp_path), run__name='a "run"', telemetry={"prometheus_port": free_port()})


@pytest.fixture
def sink(chosen: Config) -> Iterator[PrometheusSink]:
    sink = PrometheusSink(chosen)
    sink.listen()
    yield sink
    sink.close()


def scrape(run_dir: Path, accept: str = "", token: str | None = None) -> str:
    endpoint = read_endpoint(run_dir)
    assert endpoint is not None
    if token is None:
        token = Path(endpoint.token_file).read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Accept": accept}
    request = urllib.request.Request(endpoint.url, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def found(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Name and labels, without that of the run -> value."""
    samples = [sample for family in parse_text(text) for sample in family.samples]
    return {
        (each.name, tuple(sorted((key, value) for key, value in each.labels.items() if key != "run"))): each.value
        for each in samples
    }


def test_every_declared_metric_has_a_valid_name_of_its_own() -> None:
    names = [prometheus_names.name_of(metric) for metric in REGISTRY]
    every = [each.name for each in (*names, *prometheus_names.FIXED)]
    assert len(set(every)) == len(every) and set(every) == set(prometheus_names.all_names())
    assert all(re.fullmatch(r"megarl(_[a-z0-9]+)+", name) for name in every)
    assert all(re.fullmatch(r"[a-z_]+", label) and label != "run" for each in names for label in each.labels)
    assert all(each.text for each in names)


@pytest.mark.parametrize(
    ("recorded", "name", "labels"),
    [
        ("reward/mean", "megarl_reward_mean", ()),
        ("time/step", "megarl_time_step_seconds", ()),
        ("sync/seconds", "megarl_sync_seconds", ()),
        ("sync/bytes", "megarl_sync_bytes", ()),
        ("rollout/queue_depth", "megarl_rollout_queue_depth_groups", ()),
        ("reward/accuracy", "megarl_reward_accuracy_ratio", ()),
        ("time/overhead_share", "megarl_time_overhead_share", ()),
        ("perf/trainer_peak_memory_gib", "megarl_perf_trainer_peak_memory_gib", ()),
        ("perf/tokens_per_second", "megarl_perf_tokens_per_second", ()),
        ("policy/lr", "megarl_policy_lr", ()),
        ("eval/held.out/greedy", "megarl_eval_greedy_ratio", ("held.out",)),
        ("eval/held out/pass@16", "megarl_eval_pass_at_ratio", ("held out", "16")),
        ("reward/component/boxed", "megarl_reward_component", ("boxed",)),
    ],
)
def test_names_have_prefix_words_and_unit_and_placeholders_are_labels(
    recorded: str, name: str, labels: tuple[str, ...]
) -> None:
    place, values = prometheus_names.place_of(recorded)
    assert (place.name, values) == (name, labels)
    with pytest.raises(UndeclaredMetricError):
        prometheus_names.place_of(recorded + "/more/of/it")


@pytest.mark.parametrize(
    ("accept", "parse"),
    [("", parse_text), ("application/openmetrics-text; version=1.0.0", parse_openmetrics)],
)
def test_both_formats_are_read_by_the_library_with_help_and_the_newest_values(
    sink: PrometheusSink, chosen: Config, accept: str, parse: object
) -> None:
    sink.write(1, VALUES | {"eval/set-1/pass@8": 0.25, "eval/set-2/pass@8": 0.75})
    sink.write(2, {"reward/mean": 0.625, "policy/grad_norm": math.inf})
    families = {family.name: family for family in parse(scrape(chosen.run_dir, accept))}  # type: ignore[operator]
    assert families["megarl_reward_mean"].samples[0].value == 0.625
    assert families["megarl_reward_mean"].samples[0].labels == {"run": 'a "run"'}
    assert families["megarl_time_step_seconds"].samples[0].value == 2.5
    assert "Wall time of the step" in families["megarl_time_step_seconds"].documentation
    assert families["megarl_policy_grad_norm"].samples[0].value == math.inf
    assert {s.labels["set"]: s.value for s in families["megarl_eval_pass_at_ratio"].samples} == {
        "set-1": 0.25,
        "set-2": 0.75,
    }
    assert (
        families["megarl_steps_done"].samples[0].value == 2 and families["megarl_steps_planned"].samples[0].value == 4
    )
    assert abs(families["megarl_last_step_timestamp_seconds"].samples[0].value - time.time()) < 60
    assert families["megarl_run_info"].samples[0].labels["run_dir"] == str(chosen.run_dir)
    assert {family.type for family in families.values()} == {"gauge"}


def test_a_late_evaluation_does_not_turn_the_steps_back_and_a_resume_does(sink: PrometheusSink, chosen: Config) -> None:
    sink.write(7, VALUES)
    sink.write(5, {"eval/h/greedy": 0.5})
    assert found(scrape(chosen.run_dir))["megarl_steps_done", ()] == 7
    sink.roll_back(4)
    after = found(scrape(chosen.run_dir))
    assert after["megarl_steps_done", ()] == 4 and ("megarl_reward_mean", ()) not in after


def test_a_replica_a_lag_and_a_set_that_a_step_lacks_are_not_shown_with_old_values(
    sink: PrometheusSink, chosen: Config
) -> None:
    speed, lag = "rollout/replica_tokens_per_second/", "rollout/version_lag_tokens/"
    sink.write(1, {**VALUES, f"{speed}0": 1.0, f"{speed}1": 2.0, f"{lag}0": 5.0, "policy/entropy": 0.5})
    sink.write(1, {"eval/a/greedy": 0.25})
    sink.write(1, {"eval/b/greedy": 0.75})
    sink.write(2, {**VALUES, f"{speed}1": 3.0, f"{lag}1": 7.0})
    shown = found(scrape(chosen.run_dir))
    kept = {key: value for key, value in shown.items() if "replica_tokens" in key[0] or "lag_tokens" in key[0]}
    assert kept == {
        ("megarl_rollout_replica_tokens_per_second", (("replica", "1"),)): 3.0,
        ("megarl_rollout_version_lag_tokens", (("lag", "1"),)): 7.0,
    }
    assert shown["megarl_policy_entropy_nats", ()] == 0.5  # which not every step measures
    assert {key[1]: value for key, value in shown.items() if "eval_greedy" in key[0]} == {
        (("set", "a"),): 0.25,
        (("set", "b"),): 0.75,
    }


def test_only_the_token_of_the_run_opens_the_page(sink: PrometheusSink, chosen: Config) -> None:
    sink.write(1, VALUES)
    endpoint = read_endpoint(chosen.run_dir)
    assert endpoint is not None
    token_file = Path(endpoint.token_file)
    token = token_file.read_text().strip()
    assert len(token) == 64 and token not in (chosen.run_dir / "secret").read_text()
    for file in (token_file, chosen.run_dir / "prometheus.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for wrong in ("", token[:-1], token.upper(), f"{token}0", "ü"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(chosen.run_dir, token=wrong.encode().decode("latin-1"))
        assert refused.value.code == 401 and b"megarl_" not in refused.value.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(endpoint.url, timeout=10)
    assert refused.value.code == 401 and refused.value.headers["WWW-Authenticate"] == "Bearer"
    assert ("megarl_reward_mean", ()) in found(scrape(chosen.run_dir))


def test_it_listens_on_loopback_alone_and_its_end_closes_the_port(sink: PrometheusSink, chosen: Config) -> None:
    port = chosen.telemetry.prometheus_port
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    sink.close()
    assert read_endpoint(chosen.run_dir) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_nodes_address_is_used_where_an_agent_has_chosen_one(
    chosen: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_NODE_ADDRESS", "127.0.0.3")
    sink = PrometheusSink(chosen)
    sink.listen()
    try:
        sink.write(1, VALUES)
        endpoint = read_endpoint(chosen.run_dir)
        assert endpoint is not None and endpoint.url.startswith("http://127.0.0.3:")
        assert found(scrape(chosen.run_dir))["megarl_reward_mean", ()] == 0.5
    finally:
        sink.close()


def test_silent_clients_hold_no_step_and_no_other_client_for_long(
    sink: PrometheusSink, chosen: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 4.0)
    address = ("127.0.0.1", chosen.telemetry.prometheus_port)
    silent = [socket.create_connection(address, timeout=10) for _ in range(MOST_CLIENTS)]
    try:
        silent[0].sendall(b"GET /metrics HTTP/1.0\r\n")
        sink.write(1, VALUES)  # returns, although no client does
        with pytest.raises((OSError, urllib.error.URLError)):
            scrape(chosen.run_dir)  # every place is taken

        def answers() -> bool:
            try:
                return bool(scrape(chosen.run_dir))
            except (OSError, urllib.error.URLError):
                return False

        wait_until(answers, 30, "a place for the scrape")
        assert silent[0].recv(100) == b""
    finally:
        for client in silent:
            client.close()


def test_a_client_that_sends_a_byte_at_a_time_is_ended_too(
    sink: PrometheusSink, chosen: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", chosen.telemetry.prometheus_port), timeout=0.1) as client:
        ended, deadline = False, time.monotonic() + 8  # below the bound of a single wait for a byte
        while not ended and time.monotonic() < deadline:
            try:
                client.sendall(b"G")
                ended = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended


def test_many_scrapes_at_once_see_whole_steps(sink: PrometheusSink, chosen: Config) -> None:
    sink.write(0, {"reward/mean": 0.0, "reward/max": 0.0})
    torn: list[dict[object, float]] = []

    def read() -> None:
        for _ in range(10):
            each = found(scrape(chosen.run_dir))
            if not each["megarl_steps_done", ()] == each["megarl_reward_mean", ()] == each["megarl_reward_max", ()]:
                torn.append(each)  # type: ignore[arg-type]

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    step = 0
    while any(reader.is_alive() for reader in readers):
        step += 1
        sink.write(step, {"reward/mean": float(step), "reward/max": float(step)})
        time.sleep(0.001)
    assert not torn


def test_a_port_that_is_taken_is_reported_before_the_start_and_never_ends_a_run(chosen: Config) -> None:
    check_endpoint(chosen.telemetry)
    with socket.create_server(("127.0.0.1", chosen.telemetry.prometheus_port)) as taken:
        with pytest.raises(ConfigError, match=r"telemetry\.prometheus_port: port \d+ at 127\.0\.0\.1 cannot be used"):
            check_endpoint(chosen.telemetry)
        terminal = io.StringIO()
        with MetricsWriter.open(chosen, terminal) as writer:
            writer.write(1, VALUES)
            writer.flush()
            assert writer.failures == 2 and "Prometheus could not be written" in terminal.getvalue()
            taken.close()
            writer.write(2, VALUES)
            writer.flush()
            assert found(scrape(chosen.run_dir))["megarl_steps_done", ()] == 2
    assert [json.loads(line)["step"] for line in (chosen.run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="all addresses"):
        ScrapeServer(host, 0, "t" * 64, CollectorRegistry())


def test_without_a_port_nothing_listens(tmp_path: Path) -> None:
    with MetricsWriter.open(config("model", run__dir=str(tmp_path)), io.StringIO()) as writer:
        writer.write(1, VALUES)
        assert read_endpoint(tmp_path) is None and not (tmp_path / "prometheus_token").exists()
