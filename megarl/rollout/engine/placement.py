"""The places that Ray has for further engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megarl.config.schema import Config

# Custom Ray resources of rollout nodes: the first marks such a node, the second counts the engines that it can hold.
ROLLOUT_RESOURCE = "megarl_rollout"
ENGINE_RESOURCE = "megarl_engine"
# Ray's own resource of the node that runs its head. What the run cannot lose is placed there, so that it can lose any
# other rollout node.
HEAD_RESOURCE = "node:__internal_head__"
HEAD_SHARE = 0.001


def engine_needs(config: Config, *, cuda: bool) -> dict[str, float]:
    """Return the Ray resources that one engine takes, all on one node."""
    needs = {"CPU": 1.0, ENGINE_RESOURCE: 1.0}
    return needs | {"GPU": float(config.rollout.tensor_parallel)} if cuda else needs


def places_on(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how many engines nodes with these free resources can hold. An engine never spans nodes."""
    return sum(min(math.floor(node.get(name, 0.0) / amount) for name, amount in needs.items()) for node in nodes)


def free_places(needs: Mapping[str, float]) -> int:
    """Return how many engines the living nodes of this process's Ray cluster can hold besides what runs there."""
    from ray._private import state

    return places_on(state.available_resources_per_node().values(), needs)
