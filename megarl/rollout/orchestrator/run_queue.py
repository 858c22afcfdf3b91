"""The queue of a run, whose actors belong to the rollout controller: how many there are, and on which nodes."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.queue.transfer import QueueServer, start_queue
from megarl.rollout.engine.placement import HEAD_RESOURCE, ROLLOUT_RESOURCE
from megarl.rollout.engine.replica import ReplicaSpec


def start_run_queue(spec: ReplicaSpec, config: Config, partition: str) -> QueueServer:
    """Start the queue's actors, which this process owns. Raises as `start_queue` does."""
    units = config.queue.storage_units
    own_head = spec.supervisor is not None
    return start_queue(
        partition,
        namespace=spec.namespace,
        storage_units=units,
        # Several are spread over the rollout nodes, and the run ends if one of these is lost.
        node_resource=HEAD_RESOURCE if own_head and units == 1 else ROLLOUT_RESOURCE,
        timeout_s=config.timeouts.engine_start_s,
    )
