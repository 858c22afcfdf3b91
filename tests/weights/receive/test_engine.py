"""A sync into a real vLLM engine: afterwards it is the new model, to the last digit, and says so."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.lib.live_engine import LivePool
from megarl.common.errors import WeightSyncError
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import RELOAD_LAYER_SPAN, Bucket
from megarl.weights.plan.settings import SyncReport, SyncSettings
from megarl.weights.send.sender import WeightSender
from tests.support.engines.fake_engines import TRANSPORT, FakeReplica, ListExporter
from tests.support.engines.live_engine import LiveReplica, Response, reference
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.engine
# Smaller than the embedding: it travels in several buckets, and fused modules straddle buckets.
SETTINGS = SyncSettings(bucket_bytes=20_000, sync_s=60.0, rpc_s=60.0, restarts=0, transport=TRANSPORT)
PROMPTS = [[5, 17, 33, 60, 7], [80, 9, 9, 41], list(range(4, 40))]


PACKED = "its CPU kernel computes with a packed copy of the weight"


class Setup:
    """An engine started from version 0's weights, a connected sender, and three models on disk."""

    def __init__(self, directory: Path, family: str, tensor_parallel: int = 1, **dims: Any) -> None:
        self.models = [make_tiny_model(directory / f"v{i}", family=family, seed=i, **dims) for i in range(3)]
        worker = "tests.support.engines.engine_worker.EngineWorker"
        self.replica = LiveReplica(self.models[0], tensor_parallel=tensor_parallel, worker_extension_cls=worker)
        self.workers = [f"engine replica 0 worker {i}" for i in range(tensor_parallel)]
        self.exporter = ListExporter(self.weights(0))
        self.sender = WeightSender(SETTINGS, self.exporter)
        self.sender.connect(LivePool(self.replica))

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """The weights as they are in the files, in the order of layers."""
        tensors = load_file(self.models[version] / "model.safetensors")
        return dict(sorted(tensors.items(), key=lambda item: ("layers." in item[0], item[0])))

    def publish(self, version: int) -> None:
        self.exporter.tensors = self.weights(version)
        self.sender.publish(version)

    def assert_serves(self, version: int) -> None:
        futures = [self.replica.generate(p, f"{version}-{i}-{time.time()}") for i, p in enumerate(PROMPTS)]
        for prompt, future in zip(PROMPTS, futures, strict=True):
            response: Response = future.result(120)
            assert response.versions == [(str(version), 0, len(response.ids))]
            greedy, logprobs = reference(self.models[version], prompt, response.ids)
            assert response.ids == greedy
            difference = (torch.tensor(response.logprobs) - logprobs).abs()
            assert difference.mean() <= 1e-5 and difference.max() <= 1e-4


# Tied embeddings: on CPU the head's kernel keeps a packed weight of its own, and an update must reach both.
# vLLM pads experts of 48 and 24 rows on CPU, but not those of 64. The mixture of experts of TP 2 has a dense layer too:
# its workers hold a shard of every kind of weight. The slow engines have whole weights of its kinds, or fewer kinds.
ENGINES: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3", "tie_word_embeddings": True},
    "moe": {"family": "qwen3_moe", "moe_intermediate_size": 64},
    "moe TP2": {"family": "qwen3_moe", "tensor_parallel": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]},
    "dense TP2": {"family": "qwen3", "tensor_parallel": 2},
    # vLLM has no kernel for it in fp32 on a CPU: without megarl's the engine dies at the first request.
    "delta": {"family": "qwen3_5", "num_hidden_layers": 4},
}
SLOW = ("moe", "dense TP2", "moe TP2")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("models"), **ENGINES[request.param])
    yield setup
    setup.replica.shutdown()


def on(*engines: str) -> pytest.MarkDecorator:
    """Run a test on these engines. Each is started once: pytest runs the tests of one after the other."""
    marks = {name: [pytest.mark.slow] if name in SLOW else [] for name in engines}
    return pytest.mark.parametrize("engine", [pytest.param(name, marks=marks[name]) for name in engines], indirect=True)


@on(*ENGINES)
def test_after_a_sync_the_engine_is_the_new_model(engine: Setup) -> None:
    engine.publish(1)
    engine.assert_serves(1)
    report = engine.sender.publish(1)  # the same again: nothing of the first is left over
    engine.assert_serves(1)
    assert report.buckets > 10 and report.bytes == sum(t.nbytes for t in engine.weights(1).values())
    assert all(PACKED in way for way in engine.replica.ask_workers("loaded"))
    assert engine.sender.plan.layer_span == RELOAD_LAYER_SPAN, "an engine that reloads gets tensors layer by layer"


@on("dense", "moe TP2")
def test_the_processes_of_an_engine_end_with_their_parents(engine: Setup) -> None:
    """Nothing else of megarl ends the workers of an engine whose actor was killed."""
    found = engine.replica.ask_workers("death_signal")
    assert len(found) == len(engine.workers) and {number for _, number in found} == {signal.SIGKILL}
    kind = "VllmWorker" if len(found) > 1 else "EngineCore"
    assert all(name.startswith(kind) for name, _ in found), found


@pytest.mark.parametrize(
    ("engine", "recompute"),
    [("dense", True), ("dense", False), ("delta", True)],
    ids=["recomputed", "kept caches", "recomputed states"],
    indirect=["engine"],
)
def test_requests_in_flight_go_on_under_the_new_version(
    engine: Setup, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """With recomputed KV caches new tokens follow the new weights over the whole prefix.

    Otherwise they follow values of the old weights for all tokens that were in the cache (`weight_sync.recompute_kv`).
    """
    engine.publish(1)
    monkeypatch.setattr(engine.sender._engines, "_recompute_kv", recompute)
    length = 400
    futures = [engine.replica.generate(p, f"flight-{i}-{recompute}", max_tokens=length) for i, p in enumerate(PROMPTS)]
    engine.replica.wait_begun(*(f"flight-{i}-{recompute}" for i in range(len(PROMPTS))))
    engine.publish(2)
    for prompt, future in zip(PROMPTS, futures, strict=True):
        response: Response = future.result(120)
        assert [span[0] for span in response.versions] == ["1", "2"], "the sync must fall into the generation"
        (_, start, change), (_, resumed, end) = response.versions
        assert start == 0 and change == resumed and end == length
        cached = 0 if recompute else change - 1  # of the response; the last token before the sync is fed after it
        old, new = engine.models[1], engine.models[2]
        before = reference(old, prompt, response.ids)
        after = reference(new, prompt, response.ids, old if cached else None, cached)
        for part, (greedy, logprobs) in ((slice(0, change), before), (slice(change, length), after)):
            assert response.ids[part] == greedy[part]
            assert (torch.tensor(response.logprobs) - logprobs).abs()[part].mean() <= 1e-5
    engine.assert_serves(2)


@on("delta")
def test_states_that_are_kept_stay_those_of_the_old_weights(engine: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is why `weight_sync.recompute_kv: false` is refused for these models."""
    engine.publish(1)
    monkeypatch.setattr(engine.sender._engines, "_recompute_kv", False)
    future = engine.replica.generate(PROMPTS[0], "kept states", max_tokens=400)
    engine.replica.wait_begun("kept states")
    engine.publish(2)
    response: Response = future.result(120)
    assert [span[0] for span in response.versions] == ["1", "2"], "the sync must fall into the generation"
    change = response.versions[1][1]
    _, logprobs = reference(engine.models[2], PROMPTS[0], response.ids)
    assert (torch.tensor(response.logprobs) - logprobs).abs()[change:].mean() > 10 * 1e-5


@on("dense", "moe TP2")
def test_an_engine_that_reloads_takes_all_weights_again_after_a_sync_that_another_member_has_interrupted(
    engine: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests go on. What it serves then is in every bit what it serves after a sync without a failure."""
    interrupted = check_interrupted_sync(engine, monkeypatch)
    assert all(complete and left for _, complete, left in interrupted.progress), "it was not in the middle"
    assert all(PACKED in way for way in engine.replica.ask_workers("loaded"))


@on("moe")
def test_without_the_workaround_experts_are_wrong(engine: Setup) -> None:
    """This is the reason for `prepack_updated_experts`: without it a sync gives another model."""
    engine.replica.ask_workers("set_workaround", False)
    try:
        engine.publish(2)
        with pytest.raises(AssertionError):
            engine.assert_serves(2)
    finally:
        engine.replica.ask_workers("set_workaround", True)
    engine.publish(2)
    engine.assert_serves(2)


@on(*ENGINES)
def test_loading_in_place_gives_the_same_bits_as_a_reload(engine: Setup) -> None:
    """It gives the same model too. After this test the engine has its weights in the layout that vLLM uses on CUDA."""
    engine.replica.ask_workers("unpack")
    bits: dict[str, list[Any]] = {}
    for way in ("layer-wise reload: a test asks for it", "in place by recorded copies"):
        engine.replica.ask_workers("force_reload", way.startswith("layer"))
        bits[way] = []
        for version in (1, 2):
            engine.publish(version)
            engine.assert_serves(version)
            bits[way].append(engine.replica.ask_workers("live_weights"))
        assert engine.replica.ask_workers("loaded") == [way] * len(engine.workers)
    reloaded, loaded = bits.values()
    assert loaded == reloaded and loaded[0] != loaded[1]
    engine.sender.close()  # the next group asks the workers again, and gets a plan without a limit of layers
    engine.publish(1)
    assert engine.sender.plan.layer_span is None
    engine.assert_serves(1)


class Interrupted:
    """A sync of a version into the engine in whose middle a second, fake one fails, and which is then repeated.

    The sender holds its later buckets back until the failure is known. When the engine has given up the first attempt,
    `progress` is what its workers have loaded, and `weights` are their digests. `in_flight` is a response that it makes
    meanwhile.
    """

    def __init__(self, engine: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self._failed = engine, threading.Event()
        self.progress: list[tuple[bool, int, int]] = []
        self.weights: list[dict[str, str]] = []
        self.in_flight: Any = None
        self._call = engine.replica.call
        engine.sender.close()
        monkeypatch.setattr(engine.replica, "call", self._watched)

    def publish(self, version: int) -> SyncReport:
        fake, exporter = FakeReplica("replica 1"), ListExporter(self.engine.weights(version))
        fake.loaders[0].before_load = self._fail
        exporter.before_copy = self._hold_back
        settings = SyncSettings(**{**SETTINGS.__dict__, "restarts": 1})
        sender = WeightSender(settings, exporter)
        sender.connect(LivePool(self.engine.replica, fake))
        assert len(sender.plan.buckets) > 10
        try:
            return sender.publish(version)
        finally:
            sender.close()
            self.engine.sender.close()  # its group has ended with the engine's membership

    def _fail(self, load: int) -> None:
        if load == 3:
            self._failed.set()
            raise RuntimeError("a test says so")

    def _hold_back(self, tensor: int) -> None:
        if tensor == len(self.engine.exporter.tensors) // 2 and not self.progress:
            self._failed.wait(60)
            time.sleep(2.0)  # in which the failure is known to all

    def _watched(self, method: str, *args: Any, timeout_s: float) -> Any:
        ask = self.engine.replica.ask_workers
        if method == "pause" and self.in_flight is None:  # so late that it cannot have ended before
            self.in_flight = self.engine.replica.generate(PROMPTS[0], "in-flight", max_tokens=400)
            self.engine.replica.wait_begun("in-flight")
        if method == "abandon_weight_update":
            self.progress = ask("interrupted")
        result = self._call(method, *args, timeout_s=timeout_s)
        if method == "abandon_weight_update":
            self.weights = ask("live_weights")
            with pytest.raises(RuntimeError, match="two versions"):
                self._call("resume", timeout_s=timeout_s)
        return result


def answers(engine: Setup, name: str) -> list[tuple[list[int], list[float]]]:
    """Greedy responses and their log-probs, one after the other, so that they are the same in the last bit."""
    found = [engine.replica.generate(p, f"{name}-{i}").result(120) for i, p in enumerate(PROMPTS)]
    return [(each.ids, each.logprobs) for each in found]


def check_interrupted_sync(engine: Setup, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    engine.sender.close()
    engine.publish(1)
    expected, bits = answers(engine, "fresh"), engine.replica.ask_workers("live_weights")
    engine.publish(2)
    before = engine.replica.ask_workers("live_weights")
    interrupted = Interrupted(engine, monkeypatch)
    report = interrupted.publish(1)
    assert report.restarted == ("replica 1",) and engine.replica.failed is None
    assert interrupted.progress and all(cut for cut, _, _ in interrupted.progress)
    response: Response = interrupted.in_flight.result(120)
    assert [span[0] for span in response.versions] == ["2", "1"] and response.versions[-1][2] == 400
    change = response.versions[1][1]
    for version, part in ((2, slice(0, change)), (1, slice(change, 400))):
        assert response.ids[part] == reference(engine.models[version], PROMPTS[0], response.ids)[0][part]
    assert answers(engine, "repeated") == expected
    assert engine.replica.ask_workers("live_weights") == bits != before
    engine.assert_serves(1)
    engine.sender.close()
    engine.publish(2)
    engine.assert_serves(2)
    return interrupted


@on("dense", "moe TP2")
def test_an_engine_in_place_takes_all_weights_again_after_a_sync_that_another_member_has_interrupted(
    engine: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.replica.ask_workers("unpack")
    engine.replica.ask_workers("force_reload", True)
    engine.sender.close()
    engine.publish(0)
    engine.replica.ask_workers("force_reload", False)
    interrupted = check_interrupted_sync(engine, monkeypatch)
    first, second = interrupted.engine.replica.ask_workers("live_weights"), interrupted.weights
    same = [sum(a[name] == b[name] for name in a) for a, b in zip(first, second, strict=True)]
    assert all(0 < count < len(first[0]) for count in same), "the sync was not interrupted in the middle"
    assert all("in place" in way for way in engine.replica.ask_workers("loaded"))


@on("dense", "moe TP2")
def test_a_corrupt_sync_is_not_published(engine: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """This must be the last test of an engine, which is half loaded afterwards and must not serve."""
    engine.replica.ask_workers("force_reload", len(engine.workers) == 1)
    engine.sender.close()
    engine.publish(1)
    way = "layer-wise reload: a test asks for it" if len(engine.workers) == 1 else "in place, recording copies"
    assert engine.replica.ask_workers("loaded") == [way] * len(engine.workers)
    seal = BucketPacker.seal

    def corrupted(self: BucketPacker, bucket: Bucket, version: int) -> int:
        value = seal(self, bucket, version)
        self.wire(bucket)[77] ^= 4 if bucket.index == 6 else 0
        return value

    monkeypatch.setattr(BucketPacker, "seal", corrupted)
    with pytest.raises(WeightSyncError, match="bucket 7 of version 2") as info:
        engine.publish(2)
    # The first worker that finds it ends the sync for the other one.
    assert info.value.failed_members and set(info.value.failed_members) <= set(engine.workers)
    assert info.value.needs_restart == ("replica 0",)
    assert engine.replica.version() == "1" and engine.replica.failed is not None
    waiting = engine.replica.generate(PROMPTS[0], "after")
    time.sleep(1.0)
    assert not waiting.done(), "a replica that failed a sync must not produce a token"
    waiting.cancel()
    with pytest.raises(Exception, match="must be restarted"):
        engine.replica.call("start_weight_update", timeout_s=30.0)
