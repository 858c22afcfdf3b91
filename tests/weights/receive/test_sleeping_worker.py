"""A real vLLM engine whose sleep loses its weights: a sync brings them, and without one it serves nothing."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from benchmarks.lib.live_engine import LivePool
from megarl.common.values import MIB
from megarl.rollout.engine.engine_args import SLEEPING_CPU_WORKER
from megarl.weights.send.sender import WeightSender
from megarl.weights.send.sleep import HeldMemory, put_to_sleep, wake_caches
from tests.support.engines.fake_engines import ListExporter
from tests.support.engines.live_engine import LiveReplica, Response
from tests.support.models.tiny import make_tiny_model
from tests.weights.receive.test_engine import PROMPTS, SETTINGS, Setup

pytestmark = pytest.mark.engine
LONG = 300


class Sleeping(Setup):
    """An engine that begins asleep, and a sender that knows it."""

    def __init__(self, directory: Path, **dims: Any) -> None:
        self.models = [make_tiny_model(directory / f"v{i}", family="qwen3", seed=i, **dims) for i in range(3)]
        worker = "tests.support.engines.engine_worker.EngineWorker"
        self.replica = LiveReplica(
            self.models[0], worker_extension_cls=worker, worker_cls=SLEEPING_CPU_WORKER, load_format="dummy"
        )
        self.exporter = ListExporter(self.weights(0))
        self.sender = WeightSender(replace(SETTINGS, asleep=True), self.exporter)
        put_to_sleep([self.replica], 60.0)
        self.sender.connect(LivePool(self.replica))

    def publish(self, version: int) -> None:
        super().publish(version)
        assert wake_caches([self.replica], 60.0) == []


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleeping]:
    setup = Sleeping(tmp_path_factory.mktemp("models"), tie_word_embeddings=True)
    yield setup
    setup.replica.shutdown()


def test_an_engine_that_slept_is_the_model_that_was_published_since(engine: Sleeping) -> None:
    for version in (1, 2):
        engine.publish(version)
        engine.assert_serves(version)
        put_to_sleep([engine.replica], 60.0)
        (weights,) = engine.replica.ask_workers("live_weights")
        assert len(set(weights.values())) < len(weights) // 2, "the weights are still there"


def test_requests_in_flight_wait_for_the_next_weights_and_go_on(engine: Sleeping) -> None:
    engine.publish(1)
    flight = engine.replica.generate(PROMPTS[0], "flight", max_tokens=LONG)
    engine.replica.wait_begun("flight")
    put_to_sleep([engine.replica], 60.0)
    late = engine.replica.generate(PROMPTS[1], "late")
    time.sleep(0.5)
    assert not flight.done() and not late.done()
    engine.publish(2)
    response: Response = flight.result(120)
    assert [span[0] for span in response.versions] == ["1", "2"] and len(response.ids) == LONG
    assert [span[0] for span in late.result(120).versions] == ["2"]
    engine.assert_serves(2)
    put_to_sleep([engine.replica], 60.0)


def test_what_an_engine_holds_asleep_does_not_grow_with_the_sizes_of_its_batches(engine: Sleeping) -> None:
    """A kernel for each of 40 more numbers of tokens, in five shapes of weights, would be over 30 MiB."""
    held = []
    for begin in (1, 21, 41):
        engine.publish(1)
        for length in range(begin, begin + 20):
            engine.replica.generate([length] * length, f"batch of {length}", max_tokens=1).result(60)
        kept = HeldMemory()
        assert put_to_sleep([engine.replica], 60.0, kept) == []
        held.append(kept.most_asleep)
    assert max(held[1:]) - held[0] < 8 * MIB, held


def test_an_engine_that_is_woken_without_weights_serves_nothing(engine: Sleeping) -> None:
    """It is refused, and could not compute. This must be the last test: the engine dies in it."""
    assert wake_caches([engine.replica], 60.0) == ["replica 0"]
    assert "has had no weights since it slept" in str(engine.replica.failed)
    assert engine.replica.run(engine.replica._engine.wake_up(), 60)
    with pytest.raises(EngineDeadError):
        engine.replica.generate(PROMPTS[0], "unloaded").result(60)
