"""The number of engines that fit into what nodes have free, and the start of two on one GPU."""

import asyncio
from pathlib import Path

import pytest

from megarl.rollout.engine.placement import ENGINE_RESOURCE, engine_needs, places_on, starting_alone

GPU_ENGINE = {"CPU": 1.0, ENGINE_RESOURCE: 1.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        ([], 0),
        ([{"CPU": 9.0, "GPU": 8.0}], 0),  # of the trainer: it offers no places
        ([{"CPU": 9.0, "GPU": 8.0, ENGINE_RESOURCE: 4.0}], 4),
        ([{"CPU": 9.0, "GPU": 1.0, ENGINE_RESOURCE: 4.0}] * 2, 0),  # one GPU on each: an engine never spans nodes
        ([{"CPU": 1.5, "GPU": 8.0, ENGINE_RESOURCE: 4.0}, {"CPU": 9.0, "GPU": 5.0, ENGINE_RESOURCE: 4.0}], 3),
    ],
)
def test_an_engine_takes_all_it_needs_on_one_node(nodes: list[dict[str, float]], places: int) -> None:
    assert places_on(nodes, GPU_ENGINE) == places


def test_an_engine_needs_its_gpus_only_on_gpus() -> None:
    assert engine_needs(2, cuda=True) == GPU_ENGINE
    assert engine_needs(2, cuda=False) == {"CPU": 1.0, ENGINE_RESOURCE: 1.0}


def test_engines_of_one_gpu_start_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_PRIVATE_DIRECTORY", str(tmp_path))
    steps: list[str] = []

    async def start(name: str, began: asyncio.Event, goes_on: asyncio.Event, device: str = "0") -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
        async with starting_alone(name, 60.0, cuda=True):
            steps.append(f"{name} begins")
            began.set()
            await goes_on.wait()
            steps.append(f"{name} is up")

    async def both() -> None:
        first, second, third, up = (asyncio.Event() for _ in range(4))
        tasks = [asyncio.create_task(start("replica 0", first, up))]
        await first.wait()
        tasks.append(asyncio.create_task(start("teacher big", second, up)))
        await asyncio.sleep(0)
        await start("replica 1", third, third, device="1")  # another GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with pytest.raises(TimeoutError, match=r"replica 2 waited 0 s \(timeouts.engine_start_s\) for replica 0 to st"):
            async with starting_alone("replica 2", 0.0, cuda=True):
                pass
        async with starting_alone("replica 3", 0.0, cuda=False):
            steps.append("without a GPU")
        up.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    alone = ["replica 0 begins", "replica 0 is up", "teacher big begins", "teacher big is up"]
    assert [step for step in steps if step in alone] == alone
    assert steps.index("replica 1 is up") < steps.index("without a GPU") < steps.index("replica 0 is up")
