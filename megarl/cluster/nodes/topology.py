"""Which node of a job runs what: pure arithmetic on the config.

Separate pools: trainer nodes first, then rollout nodes; the supervisor lives on the first rollout node. Shared nodes:
every node has a share of both pools; the supervisor lives on the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.pools import Pools, resolve_pools
from megarl.config.schema import Config

STOP_MARGIN_S = 300


@dataclass(frozen=True)
class NodePlan:
    """One node's share. Device indices count within what the allocation gives the node (on CPU: processes)."""

    index: int
    trainer_rank: int | None  # torchrun's node rank
    trainer_devices: tuple[int, ...]
    rollout_devices: tuple[int, ...]
    engines: int
    supervisor: bool

    @property
    def gpus(self) -> int:
        return len(self.trainer_devices) + len(self.rollout_devices)

    @property
    def last_device(self) -> int:
        return max((*self.trainer_devices, *self.rollout_devices))

    @property
    def role(self) -> str:
        parts = ["trainer"] * bool(self.trainer_devices) + ["rollout"] * bool(self.rollout_devices)
        return " + ".join(parts + ["supervisor"] * self.supervisor)


@dataclass(frozen=True)
class Topology:
    """All nodes of a job, by index."""

    nodes: tuple[NodePlan, ...]
    trainer_nodes: int
    ranks_per_node: int

    @property
    def node_gpus(self) -> int:
        """GPUs that a node must have: indices may leave gaps."""
        return max(node.last_device for node in self.nodes) + 1

    @property
    def supervisor(self) -> NodePlan:
        return next(node for node in self.nodes if node.supervisor)

    def trainer(self, rank: int) -> NodePlan:
        return next(node for node in self.nodes if node.trainer_rank == rank)


def make_topology(config: Config) -> Topology:
    """ConfigError as in `resolve_pools`."""
    pools = resolve_pools(config)
    engines = pools.rollout.gpus_per_node // config.rollout.tensor_parallel
    nodes = []
    for index in range(pools.nodes):
        trains = pools.shared or index < pools.trainer.nodes
        rolls = pools.shared or index >= pools.trainer.nodes
        nodes.append(
            NodePlan(
                index=index,
                trainer_rank=index if trains else None,
                trainer_devices=pools.trainer.devices if trains else (),
                rollout_devices=pools.rollout.devices if rolls else (),
                engines=engines if rolls else 0,
                supervisor=index == _supervisor(pools),
            )
        )
    return Topology(tuple(nodes), pools.trainer.nodes, pools.trainer.gpus_per_node)


def _supervisor(pools: Pools) -> int:
    return 0 if pools.shared else pools.trainer.nodes


def stop_seconds(config: Config) -> int:
    """Seconds a run has from being asked to stop until it is killed: its step, then the save."""
    return config.launch.stop_before_s or int(config.timeouts.save_s) + STOP_MARGIN_S
