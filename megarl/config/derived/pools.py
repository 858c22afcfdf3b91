"""Assigns GPUs and nodes to the trainer and the rollout pool, only from the config."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.common.errors import ConfigError
from megarl.config.derived.teachers import engine_teachers, sharing_teachers
from megarl.config.schema import Config, ParallelConfig, RolloutConfig, TrainerConfig
from megarl.config.schema.algorithm import TeacherConfig
from megarl.models.megatron.layout import Layout


def trainer_layout(parallel: ParallelConfig, gpus: int) -> Layout:
    """Return the layout of `gpus` trainer ranks under `trainer.parallel`. Raises ValueError like `Layout`."""
    return Layout(
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        pipeline_layout=parallel.pipeline_layout,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        sequence=parallel.sequence,
        world_size=gpus,
    )


@dataclass(frozen=True)
class Pool:
    """The GPUs of one side: the same device indices on each of its nodes."""

    name: str
    gpus: int
    nodes: int
    devices: tuple[int, ...]

    @property
    def gpus_per_node(self) -> int:
        """The number of GPUs on each of its nodes."""
        return len(self.devices)


@dataclass(frozen=True)
class Pools:
    """The GPUs of both sides; `shared`: on the same nodes, where devices are disjoint unless `rollout.share_gpus`."""

    trainer: Pool
    rollout: Pool
    shared: bool

    @property
    def nodes(self) -> int:
        """The number of nodes of both sides."""
        return self.trainer.nodes if self.shared else self.trainer.nodes + self.rollout.nodes


def most_replicas(rollout: RolloutConfig) -> int:
    """Return the number of engines for which the rollout nodes have room."""
    return rollout.max_replicas or rollout.replicas


def engines_per_node(pool: Pool, rollout: RolloutConfig, teachers: Sequence[TeacherConfig]) -> int:
    """Return the number of engines, including teachers', for which a node of the rollout `pool` has room.

    On several nodes all engines have equally many GPUs, or share each GPU in pairs.
    """
    if pool.nodes == 1:
        return most_replicas(rollout) + sum(each.replicas for each in engine_teachers(teachers))
    return pool.gpus_per_node // rollout.tensor_parallel * (2 if sharing_teachers(teachers) else 1)


def resolve_pools(config: Config) -> Pools:
    """Return the devices of both pools. Raises ConfigError for sizes and devices that do not fit together."""
    trainer, rollout = config.trainer, config.rollout
    problems: list[str] = []
    if most_replicas(rollout) < rollout.replicas:
        problems.append(
            f"rollout.max_replicas: {rollout.max_replicas} is less than rollout.replicas={rollout.replicas}; raise it, "
            "or remove it"
        )
    t_per_node = _per_node("trainer", trainer.gpus, trainer.gpus_per_node, trainer.devices, problems)
    # Including GPUs for later engines and for the teachers' engines.
    r_total = most_replicas(rollout) * rollout.tensor_parallel
    r_total += sum(
        each.replicas * each.tensor_parallel for each in engine_teachers(config.teachers) if each.gpu_share is None
    )
    r_per_node = _per_node("rollout", r_total, rollout.gpus_per_node, rollout.devices, problems)
    if rollout.share_gpus:  # spread over the trainer's nodes
        r_per_node = max(1, r_total * t_per_node // trainer.gpus)
        problems += _share_problems(trainer.gpus // t_per_node, t_per_node, r_total, r_per_node)
    node_size = rollout.gpus_per_node or (len(rollout.devices) if rollout.devices else r_per_node)
    problems += _engine_sizes(rollout.tensor_parallel, config.teachers, node_size, r_per_node, r_total)
    if problems:
        raise ConfigError(problems)
    shared = _shared(trainer, rollout)
    t_nodes, r_nodes = trainer.gpus // t_per_node, r_total // r_per_node
    if shared and t_nodes != r_nodes:
        raise ConfigError([
            f"rollout.nodes: the pools share their nodes, but the trainer has {t_nodes} and the rollout pool "
            f"{r_nodes}; set rollout.nodes=separate, or make gpus / gpus_per_node agree"
        ])  # fmt: skip
    t_devices, r_devices = _devices(trainer.devices, rollout.devices, shared, t_per_node, r_per_node)
    if rollout.share_gpus:
        r_devices = t_devices[:r_per_node]
    overlap = sorted(set(t_devices) & set(r_devices))
    if shared and overlap and not rollout.share_gpus:
        raise ConfigError([
            f"rollout.devices: overlaps trainer.devices in {overlap}; give each GPU to one pool, or set "
            "rollout.nodes=separate if these are different machines"
        ])  # fmt: skip
    return Pools(
        Pool("trainer", trainer.gpus, t_nodes, t_devices),
        Pool("rollout", r_total, r_nodes, r_devices),
        shared,
    )


def _share_problems(nodes: int, t_per_node: int, r_total: int, r_per_node: int) -> Iterator[str]:
    """Yield why engines with `r_total` GPUs cannot share the trainer's."""
    if r_total > nodes * t_per_node or r_per_node * nodes != r_total:
        yield (
            f"rollout.share_gpus: engines of {r_total} GPUs (rollout.replicas x rollout.tensor_parallel) cannot be "
            f"spread evenly over the trainer's {nodes * t_per_node} on {nodes} node(s); use as many of each node, at "
            "most all of them"
        )


def _engine_sizes(
    own: int, teachers: Sequence[TeacherConfig], node_size: int, per_node: int, total: int
) -> Iterator[str]:
    """Yield the engines that do not fit into nodes of `node_size` GPUs, of which `per_node` are used (`total` in all).

    `own`: GPUs of an engine of the policy.
    """
    if own > node_size:
        yield (
            f"rollout.tensor_parallel: {own} GPUs per engine, but the pool has {node_size} on a node; an engine never "
            f"spans nodes: lower it to at most {node_size} and raise rollout.replicas"
        )
    elif per_node % own and per_node < total:
        yield (
            f"rollout.gpus_per_node: {per_node} is not a multiple of rollout.tensor_parallel={own}; an engine never "
            "spans nodes: change one of them"
        )
    for index, teacher in enumerate(teachers):
        key = f"teachers.{index}.tensor_parallel: {teacher.tensor_parallel}"
        if teacher.where == "engine" and teacher.tensor_parallel > node_size:
            yield f"{key} GPUs per engine, but a node of the pool has {node_size}, and no engine spans nodes: lower it"
        elif teacher.where == "engine" and teacher.tensor_parallel != own and per_node < total:
            yield (
                f"{key} differs from rollout.tensor_parallel={own}, so that engines could block each other's GPUs on "
                "several nodes; make them equal, or have one node"
            )


def _per_node(name: str, total: int, per_node: int | None, devices: list[int] | None, problems: list[str]) -> int:
    """Return the number of GPUs of a pool on each of its nodes; append its problems to `problems`."""
    if devices is not None:
        if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
            problems.append(f"{name}.devices: {devices} must be distinct indices >= 0; correct the list")
        if per_node is not None and per_node != len(devices):
            problems.append(
                f"{name}.devices: {len(devices)} devices but {name}.gpus_per_node={per_node}; remove one of the keys"
            )
        per_node = max(1, len(devices))
        if total < per_node:
            problems.append(f"{name}.devices: {per_node} devices for {total} GPUs; list only {total} devices")
    size = min(per_node or total, total)
    if total % size:
        fix = "trainer.gpus" if name == "trainer" else "rollout.replicas (or max_replicas) x rollout.tensor_parallel"
        problems.append(f"{name}.gpus_per_node: {fix} = {total} is not a multiple of {size}; nodes are filled evenly")
    return size


def _shared(trainer: TrainerConfig, rollout: RolloutConfig) -> bool:
    """Return whether both pools are on the same nodes (`rollout.nodes`)."""
    if rollout.share_gpus:
        return True
    if rollout.nodes != "auto":
        return rollout.nodes == "shared"
    per_node = trainer.gpus_per_node is not None and rollout.gpus_per_node is not None
    listed = trainer.devices is not None or rollout.devices is not None
    return listed or not per_node


def _devices(
    t_listed: list[int] | None, r_listed: list[int] | None, shared: bool, t_size: int, r_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (trainer's, rollout's) devices: the listed ones, else the lowest indices that the other lacks."""
    taken = set(r_listed or ()) if shared else set()
    t_devices = tuple(t_listed) if t_listed is not None else _lowest(t_size, taken)
    taken = set(t_devices) if shared else set()
    return t_devices, tuple(r_listed) if r_listed is not None else _lowest(r_size, taken)


def _lowest(count: int, taken: set[int]) -> tuple[int, ...]:
    free = (index for index in range(count + len(taken) + 1) if index not in taken)
    return tuple(next(free) for _ in range(count))
