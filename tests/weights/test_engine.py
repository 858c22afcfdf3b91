"""A sync into a real vLLM engine: afterwards it is the new model, to the last digit, and says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.weights.bucket_packer import BucketPacker
from megarl.weights.buckets import Bucket
from megarl.weights.sender import SyncSettings, WeightSender
from tests.support.fake_engines import ListExporter
from tests.support.live_engine import LivePool, LiveReplica, Response, reference
from tests.support.tiny import make_tiny_model

pytestmark = pytest.mark.engine
# Smaller than the embedding: it travels in several buckets, and fused modules straddle buckets.
SETTINGS = SyncSettings(bucket_bytes=20_000, sync_s=60.0, rpc_s=60.0, restarts=0, transport="gloo")
PROMPTS = [[5, 17, 33, 60, 7], [80, 9, 9, 41], list(range(4, 40))]


class Setup:
    """An engine started from version 0's weights, a connected sender, and three models on disk."""

    def __init__(self, directory: Path, family: str, **dims: int) -> None:
        self.models = [make_tiny_model(directory / f"v{i}", family=family, seed=i, **dims) for i in range(3)]
        self.replica = LiveReplica(self.models[0], worker_extension_cls="tests.support.live_engine.WithoutWorkaround")
        self.exporter = ListExporter(self.weights(0))
        self.sender = WeightSender(SETTINGS, self.exporter)
        self.sender.connect(LivePool(self.replica))

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """As they are in the files, in the order of layers."""
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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    # Tied embeddings: on CPU vLLM keeps the head's weight apart from the embedding's, and an update must reach both.
    setup = Setup(tmp_path_factory.mktemp("dense"), "qwen3", tie_word_embeddings=True)
    yield setup
    setup.replica.shutdown()


def test_after_a_sync_the_engine_is_the_new_model(dense: Setup) -> None:
    dense.publish(1)
    dense.assert_serves(1)
    report = dense.sender.publish(1)  # the same again: nothing of the first is left over
    dense.assert_serves(1)
    assert report.buckets > 10 and report.bytes == sum(t.nbytes for t in dense.weights(1).values())


def test_requests_in_flight_go_on_under_the_new_version(dense: Setup) -> None:
    dense.publish(1)
    length = 400
    futures = [dense.replica.generate(p, f"flight-{i}", max_tokens=length) for i, p in enumerate(PROMPTS)]
    time.sleep(0.4)
    dense.publish(2)
    for prompt, future in zip(PROMPTS, futures, strict=True):
        response: Response = future.result(120)
        assert [span[0] for span in response.versions] == ["1", "2"], "the sync must fall into the generation"
        (_, start, change), (_, resumed, end) = response.versions
        assert start == 0 and change == resumed and end == length
        for version, part in ((1, slice(0, change)), (2, slice(change, length))):
            greedy, logprobs = reference(dense.models[version], prompt, response.ids)
            # KV caches were recomputed: new tokens follow the new weights over the whole prefix.
            assert response.ids[part] == greedy[part]
            assert (torch.tensor(response.logprobs) - logprobs).abs()[part].mean() <= 1e-5
    dense.assert_serves(2)


def test_a_corrupt_sync_is_not_published(dense: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last in this module: the engine is half loaded afterwards, and must not serve."""
    dense.publish(1)
    seal = BucketPacker.seal

    def corrupted(self: BucketPacker, bucket: Bucket, version: int) -> int:
        value = seal(self, bucket, version)
        self.wire(bucket)[77] ^= 4 if bucket.index == 6 else 0
        return value

    monkeypatch.setattr(BucketPacker, "seal", corrupted)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="bucket 7 of version 2") as info:
        dense.publish(2)
    assert time.monotonic() - start < 20.0
    assert info.value.failed_members == ("engine replica 0 worker 0",) and info.value.needs_restart == ("replica 0",)
    assert dense.replica.version() == "1" and dense.replica.failed is not None
    waiting = dense.replica.generate(PROMPTS[0], "after")
    time.sleep(1.0)
    assert not waiting.done(), "a replica that failed a sync must not produce a token"
    waiting.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_untied_families_after_a_sync(tmp_path: Path, family: str) -> None:
    setup = Setup(tmp_path, family)
    try:
        for version in (1, 2):
            setup.publish(version)
            setup.assert_serves(version)
    finally:
        setup.replica.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("moe_intermediate_size", [48, 64])  # vLLM pads the first on CPU
def test_moe_after_a_sync_the_engine_is_the_new_model(tmp_path: Path, moe_intermediate_size: int) -> None:
    setup = Setup(tmp_path, "qwen3_moe", moe_intermediate_size=moe_intermediate_size)
    try:
        for version in (1, 2, 0):
            setup.publish(version)
            setup.assert_serves(version)
        # And the reason for `prepack_updated_experts`: without it the same sync gives another model.
        setup.replica.run(setup.replica._engine.collective_rpc("forget_workaround"), 30)
        with pytest.raises((AssertionError, WeightSyncError)):
            setup.publish(0)
            setup.assert_serves(0)
    finally:
        setup.replica.shutdown()
