"""The assignment of ranks, engines and the supervisor to the nodes of a job: pure arithmetic on the config.

With separate pools, trainer nodes come first, then rollout nodes, and the supervisor runs on the first rollout node.
With shared nodes, every node has a share of both pools, and the supervisor runs on the first.
"""

from dataclasses import dataclass

from megarl.config.derived.pools import resolve_pools
from megarl.config.schema import Config
from megarl.config.schema.job import STOP_MARGIN_S, LaunchConfig, TimeoutsConfig


@dataclass(frozen=True)
class NodePlan:
    """The share of one node. Device indices count within the node's allocation (on CPU: processes)."""

    index: int
    trainer_rank: int | None  # torchrun's node rank
    trainer_devices: tuple[int, ...]
    rollout_devices: tuple[int, ...]
    engines: int
    supervisor: bool

    @property
    def last_device(self) -> int:
        """Highest device index that the node uses."""
        return max((*self.trainer_devices, *self.rollout_devices))

    @property
    def only_engines(self) -> bool:
        """True if nothing but engines runs there, so the run can continue without it."""
        return self.trainer_rank is None and not self.supervisor

    @property
    def role(self) -> str:
        """The node's parts in words, for example `trainer + rollout + supervisor`."""
        parts = ["trainer"] * bool(self.trainer_devices) + ["rollout"] * bool(self.rollout_devices)
        return " + ".join(parts + ["supervisor"] * self.supervisor)


@dataclass(frozen=True)
class Topology:
    """The nodes of a job, by index. `ranks_per_node` counts trainer ranks."""

    nodes: tuple[NodePlan, ...]
    trainer_nodes: int
    ranks_per_node: int

    @property
    def node_gpus(self) -> int:
        """The number of GPUs that each node must have; device indices may leave gaps."""
        return max(node.last_device for node in self.nodes) + 1

    def trainer(self, rank: int) -> NodePlan:
        """Return the node with torchrun's node rank `rank`."""
        return next(node for node in self.nodes if node.trainer_rank == rank)


def make_topology(config: Config) -> Topology:
    """Assign ranks, engines and the supervisor to nodes. Raises ConfigError as `resolve_pools` does."""
    pools = resolve_pools(config)
    engines = pools.rollout.gpus_per_node // config.rollout.tensor_parallel
    supervisor = 0 if pools.shared else pools.trainer.nodes
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
                supervisor=index == supervisor,
            )
        )
    return Topology(tuple(nodes), pools.trainer.nodes, pools.trainer.gpus_per_node)


def stop_seconds(launch: LaunchConfig, timeouts: TimeoutsConfig) -> int:
    """Return the seconds between stop request and end of the job: time for the current step and a save."""
    return launch.stop_before_s or int(timeouts.save_s) + STOP_MARGIN_S
