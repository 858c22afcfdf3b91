"""The number of engines that fit into what nodes have free."""

from __future__ import annotations

import pytest

from megarl.rollout.engine.placement import ENGINE_RESOURCE, engine_needs, places_on

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
