"""The config sections of the job around the training: telemetry, checkpoints, timeouts, Ray, launch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.common.options import Section

STOP_MARGIN_S = 300  # for the step in progress, in addition to a save, when a run has to end


class TelemetryConfig(Section):
    """Outputs of a run in addition to `summary.json`."""

    keep_gib: float = Field(1.0, ge=0)
    """Space limit in GiB for each of `metrics.jsonl`, `samples.jsonl` and TensorBoard's events; 1 GiB holds about
    200,000 steps. Older lines are in parts named by their offset, each an eighth of this; the oldest part is deleted
    first. 0 = keep all."""
    samples_per_step: int = Field(4, ge=0, description="Trajectories per step written to `samples.jsonl`.")
    tensorboard: bool = Field(True, description="Write TensorBoard events to `RUN_DIR/tensorboard`.")
    wandb_project: str | None = Field(None, description="Weights & Biases project; null = off.")
    mlflow_experiment: str | None = Field(None, min_length=1)
    """MLflow experiment, created if missing, on the server of the environment variable `MLFLOW_TRACKING_URI`; null =
    off. User and password belong in `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`."""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint from which Prometheus reads the newest metrics, on the node of trainer rank 0;
    `RUN_DIR/prometheus.json` has its URL and the file with its token. 0 = off."""
    prometheus_host: str | None = None
    """Address at which that endpoint listens; default: that of the run's other sockets, 127.0.0.1 on one node."""
    dump_batches: bool = False
    """Record whole batches in `RUN_DIR/batches`, and their schedule, for `megarl replay`."""
    events_mib: float = Field(24.0, ge=0)
    """Space limit in MiB for each process's events in `RUN_DIR/events`, for `megarl trace` and `report`; the oldest are
    deleted first. 0 = off."""


class CheckpointConfig(Section):
    """Saving and resuming a run; see docs/checkpoints.md."""

    dir: Path | None = Field(None, description="Directory of the checkpoints; default `RUN_DIR/checkpoints`.")
    resume: str = "auto"
    """`auto`: the newest complete checkpoint of the run, if there is one; `never`: start from the beginning (existing
    results are moved to `RUN_DIR/previous`); or the path of a checkpoint."""
    every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Steps between saves; the last step is always saved. `auto`: as often as keeps saves below 2% of the time, and at
    each step that `keep_every` or `keep_best` needs. 0 = save only after a stop request."""
    asynchronous: bool = Field(True, description="Write in the background while training continues.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_every: int = Field(0, ge=0, description="Also keep every step divisible by this; 0 = none.")
    keep_best: str | None = None
    """Also keep the checkpoint with the largest value of this evaluation metric, e.g. `eval/heldout/greedy`."""


class TimeoutsConfig(Section):
    """Upper bounds of all waits, in seconds. If one expires, the error names who waited for whom."""

    engine_start_s: float = Field(900.0, gt=0)
    """Start of an engine, including a first test request. A third of it bounds the start of Ray, and attaching to it.
    """
    rpc_s: float = Field(120.0, gt=0)
    """One read or write of the queue; any other actor call; a report of an engine that is due; one step of a busy
    engine; a thread of the controller that decodes a response, or writes the journal before a tool is called."""
    generate_s: float = Field(1800.0, gt=0)
    """One step's rollouts, one evaluation, or one request to the gateway. A response that is unfinished by then fails
    its group, or ends the run if the trainer has waited for it from its start. The engine stays if it works. A gateway
    session that is unused for twice as long is dropped."""
    weight_sync_s: float = Field(600.0, gt=0, description="One weight sync.")
    shutdown_s: float = Field(30.0, gt=0, description="Shutdown of everything the supervisor started.")
    save_s: float = Field(600.0, gt=0)
    """One checkpoint save, from the step boundary to the disk; one trainer collective."""
    node_s: float = Field(120.0, gt=0)
    """Time without a sign of life after which a node (also at its start) or a trainer rank is lost."""

    @property
    def ray_start_s(self) -> float:
        """Seconds to start the Ray head, and to attach to it."""
        return self.engine_start_s / 3

    @property
    def collective_s(self) -> float:
        """Seconds of one collective of the trainer's ranks, including those of a save."""
        return self.save_s


class GatewayConfig(Section):
    """The gateway: one URL in front of the pool, for your own harnesses; see docs/rollout/gateway.md."""

    enabled: bool = Field(False, description="Serve the pool of the run by HTTP; `RUN_DIR/gateway.json` has the URL.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0 = a free one, which stays the same for the whole run.")
    host: str | None = None
    """Address of the gateway's node at which it listens; default: that of the run's other sockets, 127.0.0.1 on one
    node."""
    image_hosts: tuple[Annotated[str, Field(pattern=r"^[^/@\s]+$")], ...] = ()
    """Hosts, `name` or `name:port`, from which the gateway fetches images that chats name by URL; their addresses have
    to be public. Empty: it reads data URLs only."""


class RayConfig(Section):
    """The Ray cluster of the run; by default the supervisor starts its own."""

    address: str | None = None
    """Attach to a running cluster instead; its rollout nodes must offer the resources `megarl_rollout` (10000 each) and
    `megarl_engine` (one per engine). Its nodes and the run need the same `RAY_AUTH_TOKEN_PATH`."""


class LaunchConfig(Section):
    """The job's request for nodes, and its behaviour at the time limit; read by `megarl launch`."""

    time_limit: str | None = Field(None, pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")
    """`[D-]HH:MM:SS` of one allocation; default: the partition's."""
    stop_before_s: int | None = Field(
        None,
        ge=1,
        description="Seconds before the time limit, and after a SIGTERM, for the run to end its step and save; "
        f"default `timeouts.save_s` + {STOP_MARGIN_S}.",
    )
    requeue: bool = Field(True, description="Queue the job again if it was stopped by its time limit.")
    max_restarts: int = Field(1, ge=0)
    """How often torchrun restarts the ranks after a failure, from the newest checkpoint."""
    sbatch: list[str] = Field(default_factory=list)
    """Further #SBATCH options, e.g. `--account=x`, `--partition=y`; they come last and take precedence. Without
    `--cpus-per-task` nodes are exclusive."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines that run before anything else, e.g. `module load x`."""
    interface: str | None = None
    """Network interface between the nodes; default: that of the route to the other nodes."""
    runtime_env: Path | None = None
    """YAML with `env_vars`, set for every process of the job (launch/runtime_env.yaml)."""
