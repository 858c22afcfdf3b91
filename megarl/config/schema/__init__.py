"""The typed configuration of a run: every key with its unit and meaning.

These classes check single values; `checks` covers conditions on several sections (layouts, overlapping pools, sizes
that must divide). `docs/reference/keys.md` is generated from these classes.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.common.options import Passed, Section
from megarl.config.schema.agent import AgentConfig, ToolConfig
from megarl.config.schema.algorithm import AlgorithmConfig, TeacherConfig
from megarl.config.schema.data import DataConfig, EvaluationConfig, RewardConfig
from megarl.config.schema.job import (
    CheckpointConfig,
    GatewayConfig,
    LaunchConfig,
    RayConfig,
    TelemetryConfig,
    TimeoutsConfig,
)
from megarl.config.schema.monitor import MonitorConfig

# What the trainer's backward pass recomputes; a number: the first layers of each stage.
Recompute = Literal["auto", "none", "selective", "full"] | Annotated[int, Field(ge=1)]
# Defaults of modes that publish less often than each step: `sync_interval`, and the share of it added to
# `max_staleness`.
DEFAULT_INTERVAL, DEFAULT_QUOTA = 4, 0.5
CPU_KV_CACHE_GIB = 1  # of an engine without a GPU
LOGPROB_CHUNK_ROWS = 1024  # of logits, in the passes for log-probs and entropy


class RunConfig(Section):
    """Name, output directory, seed and length of the run."""

    name: str = Field("run", description="Name of the run; also the default last part of its directory.")
    dir: Path | None = Field(None, description="Run directory; default `runs/NAME`.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation.")
    steps: int = Field(..., ge=1, description="Number of training steps.")
    deterministic: bool = False
    """Route groups to engines by index instead of load. A run on CPU is then reproducible bit for bit if nothing is
    generated ahead (`admission.mode: sync`)."""
    export: bool = Field(True, description="Export the final policy to `RUN_DIR/hf` in Hugging Face format.")


class VisionConfig(Section):
    """Training of vision towers, and bounds on images (docs/training/vision.md). Text models ignore this section."""

    train: Literal["none", "projector", "all"] = "projector"
    """The part of the vision tower that is trained with the language model: nothing, its projector, or all."""
    max_pixels: int = Field(1_003_520, ge=784)
    """Larger images are scaled down to this many pixels. A token stands for a square of 28 or 32 pixels a side, by the
    model."""
    images_per_prompt: int = Field(4, ge=1, description="The most images of one prompt; rows with more are refused.")


class ModelConfig(Section):
    """The policy's weights and tokenizer."""

    path: Path
    """Hugging Face directory (config.json, safetensors, tokenizer), or a Megatron checkpoint (docs/checkpoints.md)."""
    shape: Path | None = None
    """Directory with the model's config.json, for planning where `path` does not exist (see recipes). A relative path
    is also searched for above the config file."""
    load_weights: bool = Field(True, description="False keeps Megatron's seeded random initialisation.")
    vision: VisionConfig = VisionConfig()


class ParallelConfig(Section):
    """Megatron's parallel layout of the trainer ranks. The data-parallel size follows from `trainer.gpus`."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size (TP).")
    context: int = Field(1, ge=1)
    """Context-parallel size (CP): ranks that share the tokens of each sequence."""
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel size (PP).")
    virtual_pipeline: int | None = Field(None, ge=2, description="Model chunks per pipeline rank (VPP).")
    first_stage_layers: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage; default: as many as each other stage."""
    last_stage_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline stage, likewise.")
    pipeline_layout: str | None = None
    """Layers of every stage, as Megatron's `pipeline_model_parallel_layout` has them: `Ettt|(tt|)*6tL` (E embedding, t
    layer, L output layer). With VPP the second chunks of all stages follow the first ones."""
    expert: int = Field(1, ge=1, description="Expert-parallel size (EP).")
    expert_tensor: int | None = Field(None, ge=1, description="Expert tensor-parallel size (ETP); default TP.")
    sequence: bool = Field(False, description="Sequence parallelism (SP); needs TP > 1.")


class MegatronConfig(Section):
    """Fields passed by name to Megatron-Core's dataclasses; names and types are checked against them."""

    transformer: Passed = Field(default_factory=dict, description="TransformerConfig fields.")
    optimizer: Passed = Field(default_factory=dict, description="OptimizerConfig fields.")
    ddp: Passed = Field(default_factory=dict, description="DistributedDataParallelConfig fields.")


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, until the last update of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in optimizer updates; a step makes `trainer.mini_batches` of them."""
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam's beta1, beta2.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Upper bound of the global gradient norm; 0 = off.")
    distributed: bool = Field(True, description="Megatron's distributed optimizer (state sharded over DP).")


class TrainerConfig(Section):
    """The trainer: its GPUs, layout, precision, batching and optimizer."""

    gpus: int = Field(1, ge=1, description="Trainer ranks = torchrun's world size (processes on CPU).")
    gpus_per_node: int | None = Field(None, ge=1, description="Trainer GPUs on each node; default: all on one node.")
    devices: list[int] | None = Field(None, description="GPU indices of the trainer on each node.")
    device_memory_gib: float | None = Field(None, gt=0)
    """Memory of each trainer GPU in GiB, for the plan; default: that of this machine's GPU 0."""
    parallel: ParallelConfig = ParallelConfig()
    precision: Literal["bf16", "fp32"] = Field("bf16", description="Compute precision; master weights stay fp32.")
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = 8192
    """Upper bound of packed tokens per micro-batch per DP rank, which context-parallel ranks share; auto: as many as
    the plan fits, with a tenth of the memory free."""
    micro_batch_patches: int | None = Field(None, ge=1)
    """Upper bound of vision patches per micro-batch per DP rank. null: those of `micro_batch_tokens`, four per token.
    """
    recompute: Recompute = "auto"
    """Activations that the backward pass recomputes: none, selective (attention only), the first N layers of each stage
    (a number), full (all layers). auto: the first of these that the plan fits, with a tenth of the memory free. Fields
    `recompute_*` of `megatron.transformer` replace it."""
    router_replay: Literal["none", "r2", "r3"] = "none"
    """Experts that the trainer replays instead of choosing them: none; r2: in updates, those of its pass for the old
    log-probs; r3: those that the engines chose (docs/training.md#router-replay)."""
    mini_batches: int = Field(1, ge=1, description="Optimizer updates per step; the batch is split between groups.")
    max_skipped_steps: int = Field(2, ge=0)
    """Steps that one start of the run may skip because their loss, gradient or a log-prob is not finite. The batch is
    kept in `RUN_DIR/failed_batch`, and its groups count as failed. The next such step ends the run."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def token_limit(self) -> int:
        """`micro_batch_tokens` as a number. Raises ValueError for `auto`, which only a plan resolves."""
        if self.micro_batch_tokens == "auto":
            raise ValueError("trainer.micro_batch_tokens: auto has no value here, without a plan; give a number")
        return self.micro_batch_tokens


class ReferenceConfig(Section):
    """The frozen reference policy; it is built only if `algorithm.kl.coef` is above 0."""

    path: Path | None = Field(None, description="Hugging Face directory or Megatron checkpoint; default `model.path`.")
    placement: Literal["gpu", "cpu_offload"] = "cpu_offload"
    """Where its weights, and those of teachers with `where: trainer`, are kept between passes."""
    refresh_steps: int | None = Field(None, ge=1)
    """Steps after which the reference takes the policy's weights, which checkpoints then hold too; null = it keeps
    those of `path`."""


class BatchConfig(Section):
    """The size of the batch of one training step."""

    groups: int = Field(..., ge=1, description="Prompt groups per step.")
    samples_per_group: int = Field(..., ge=2, description="Responses per prompt (n).")


class SamplingConfig(Section):
    """Sampling of the training responses, always from the whole distribution, which the trainer can recompute."""

    temperature: float = Field(1.0, gt=0, description="Temperature; the trainer divides its logits by it as well.")
    max_tokens: int = Field(..., ge=1, description="Upper bound of response tokens, EOS included.")
    stop_token_ids: list[int] | None = None
    """Token ids that end a response; default: from generation config, tokenizer and chat template."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """Responses cut at max_tokens: train on them unchanged, mask them from the loss, or give reward 0."""


class RolloutConfig(Section):
    """The pool of vLLM engines."""

    replicas: int = Field(1, ge=1, description="Number of engines at the start.")
    max_replicas: int | None = Field(None, ge=1)
    """Engines for which the rollout nodes reserve room and GPUs, for `megarl pool add`; default: `replicas`."""
    tensor_parallel: int = Field(1, ge=1, description="GPUs per engine, all on one node.")
    gpus_per_node: int | None = Field(None, ge=1, description="Rollout GPUs on each node; default: all on one node.")
    devices: list[int] | None = Field(None, description="GPU indices of the pool on each node.")
    nodes: Literal["auto", "shared", "separate"] = "auto"
    """Whether the pool shares the trainer's nodes; auto: separate if `gpus_per_node` is given for both pools and
    `devices` for neither, otherwise shared."""
    device_memory_gib: float | None = Field(None, gt=0)
    """Memory of each rollout GPU in GiB, for the plan; default: that of this machine's GPU 0."""
    share_gpus: bool = False
    """Engines and trainer take turns on the same GPUs: engines sleep during training, and the trainer's state is in
    host memory during generation (docs/shared-gpus.md)."""
    max_model_len: int | None = Field(None, ge=1)
    """Upper bound of prompt + response tokens; default: what data and sampling need."""
    max_num_seqs: int = Field(256, ge=1, description="Concurrent sequences per engine.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of each GPU's memory that vLLM uses.")
    load_weights: bool = False
    """Engines read the model's weights at their start. Only a pool without a trainer (`megarl eval`) needs this:
    otherwise the first weight sync brings them before the first prompt."""
    agent_workers: int = Field(0, ge=0)
    """Processes alongside the pool that run the agent loops, with their tools and rewards
    (docs/rollout.md#agent-workers); 0: the controller's own process does. For agents that call tools, use one per 1,000
    to 5,000 trajectories in flight."""
    report_interval_s: float = Field(5.0, gt=0)
    """Seconds between an engine's reports of the tokens of unfinished responses. If the engine is lost, another one
    continues them from there."""
    partial_rollout: bool = True
    """A publication pauses running responses, which continue with the new weights. false: it waits for them to end, so
    each response has one version; new responses wait for the publication."""
    journal_s: float = Field(30.0, ge=0)
    """Largest delay in seconds of the journal of generated tokens (`RUN_DIR/rollout.journal`). A resumed run reuses
    finished groups and continues unfinished ones, as far as `admission.max_staleness` allows; 0 = off: it draws them
    again. Without effect with `run.deterministic`. With `trainer.router_replay: r3` an unfinished group is written
    again after a quarter more tokens."""
    group_deadline_s: float | None = Field(None, gt=0)
    """Seconds within which a prompt group must end; null = nine tenths of `timeouts.generate_s` where generation runs
    ahead (`admission.mode`), else no limit of its own."""
    on_group_deadline: Literal["finish", "cut", "fail"] = "cut"
    """Unfinished responses at the deadline: finish them (no deadline), cut them (they count as truncated, see
    `sampling.truncated`), or fail the group, with its lengths in `rollout/failed_length_mean`. With `cut` and `fail`, a
    group whose loops have not ended 60 s later fails."""
    on_group_failure: Literal["count", "stop"] = "count"
    """A prompt group that cannot be generated or scored: count it as failed, or end the run. Either way the run ends
    when no engine is left, or when as many groups in a row have failed as a step has. For log-probs that are not finite
    see `trainer.max_skipped_steps`."""
    engine_kwargs: Passed = Field(default_factory=dict)
    """Further AsyncEngineArgs fields; `{env: NAME}` for a secret."""


class AdmissionConfig(Section):
    """Bounds on how far generation may run ahead of training, in updates (`megarl/config/derived/staleness.py`)."""

    mode: Literal["sync", "one_step_off", "stream", "async"] = "sync"
    """sync: generation and training take turns. one_step_off: a step is generated while the one before it trains.
    stream: several steps per publication, nothing ahead of the next one. async: generation runs ahead as far as
    `max_staleness` allows."""
    sync_interval: int | None = Field(
        None,
        ge=1,
        description="Updates per publication of the weights, a multiple of `trainer.mini_batches`. Default: one step; "
        f"with stream and async {DEFAULT_INTERVAL}, rounded up to whole steps, with stream to at least two.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="The most updates between the weights of a trajectory's oldest token and the update that trains "
        f"it. Default: sync_interval - 1, the minimum; with one_step_off one step more; with async {DEFAULT_QUOTA} * "
        "sync_interval more, rounded up, and at least one step.",
    )
    refill: bool = False
    """DAPO's dynamic sampling: the next group immediately replaces a finished one whose rewards are all equal, so a
    step has `batch.groups` groups to train on. At most ten times as many are replaced; further ones enter the step, and
    the trainer filters them. Needs `algorithm.filter_zero_variance`."""
    max_uses: int = Field(1, ge=1)
    """The most steps that train a group, all within `max_staleness`. Above 1, a step whose new groups are too few while
    the trainer is idle is filled with groups of earlier steps. Only about 1 / max_uses as many groups are then
    generated ahead."""


class WeightSyncConfig(Section):
    """The transfer of weights from the trainer to the engines."""

    bucket_mb: float = Field(64.0, gt=0, le=2**20, description="Bucket size, MiB.")
    transport: Literal["auto", "nccl", "gloo", "relay"] = "auto"
    """auto: nccl on GPUs, gloo without, and with `rollout.share_gpus` relay: each rank passes the weights on to the
    engine on its GPU."""
    recompute_kv: bool = True
    """Recompute KV caches of in-flight requests after a sync. false: they continue with values of the old weights,
    which later requests do not use."""
    restarts: int = Field(1, ge=0)
    """How often a failed sync is repeated, without the failed replicas or with new ones."""


class QueueConfig(Section):
    """The trajectory queue (TransferQueue)."""

    storage_units: int = Field(1, ge=1, description="Storage actors, on the pool's nodes only.")


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()
    megatron: MegatronConfig = MegatronConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teachers: list[TeacherConfig] = Field(default_factory=list)
    """Teachers of on-policy distillation (docs/training.md#distillation)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig
    sampling: SamplingConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    agent: AgentConfig = AgentConfig()
    tools: list[ToolConfig] = Field(default_factory=list)
    """The tools that the model may call; a data set may have a list of its own."""
    evaluation: EvaluationConfig = EvaluationConfig()
    rollout: RolloutConfig = RolloutConfig()
    admission: AdmissionConfig = AdmissionConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    queue: QueueConfig = QueueConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    monitor: MonitorConfig = MonitorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    gateway: GatewayConfig = GatewayConfig()
    ray: RayConfig = RayConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.run.dir or Path("runs") / self.run.name

    @property
    def needs_reference(self) -> bool:
        """True if the run needs a reference policy."""
        return self.algorithm.kl.coef > 0

    @property
    def checkpoint_dir(self) -> Path:
        """The directory of the checkpoints."""
        return self.checkpoint.dir or self.run_dir / "checkpoints"
