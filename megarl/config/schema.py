"""Typed configuration: every knob of a run, with its unit and meaning. Unknown keys are errors.

These classes only hold and check single values; what needs several sections at once (layouts, overlapping
pools, sizes that must divide) is in `checks.py`. `docs/configuration.md` is generated from this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Infinities and NaN are refused everywhere: JSON, as which the config reaches the pool, would make them null."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


def _all_finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same for what has no type of its own."""
    for name, value in _leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("not_finite", "{name} must be a finite number", {"name": name, "value": value})
    return values


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield name, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


Passed = Annotated[dict[str, Any], AfterValidator(_all_finite)]


class RunConfig(Section):
    """What the run is called, where it writes and how long it goes on."""

    name: str = Field("run", description="Name of the run; also the default last part of its directory.")
    dir: Path | None = Field(None, description="Run directory; default `runs/NAME`.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation.")
    steps: int = Field(..., ge=1, description="Number of training steps.")
    deterministic: bool = Field(
        False,
        description="Route groups to engines by index instead of load, so that a run repeats bit for bit on CPU.",
    )
    export: bool = Field(True, description="Export the final policy to `RUN_DIR/hf` in Hugging Face format.")


class ModelConfig(Section):
    """The policy's weights and tokenizer."""

    path: Path = Field(
        ...,
        description="Hugging Face directory (config.json, safetensors, tokenizer), or a Megatron checkpoint "
        "(docs/converter.md).",
    )
    shape: Path | None = Field(
        None, description="Directory with the model's config.json, for planning where `path` is not (recipes have one)."
    )
    load_weights: bool = Field(True, description="False: keep Megatron's seeded random initialisation.")


class ParallelConfig(Section):
    """Megatron layout of the trainer ranks. Data parallelism is what remains of `trainer.gpus`."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size (TP).")
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel size (PP).")
    virtual_pipeline: int | None = Field(None, ge=2, description="Model chunks per pipeline rank (VPP).")
    expert: int = Field(1, ge=1, description="Expert-parallel size (EP).")
    expert_tensor: int | None = Field(None, ge=1, description="Expert tensor-parallel size (ETP); default TP.")
    sequence: bool = Field(False, description="Sequence parallelism (SP); needs TP > 1.")


class MegatronConfig(Section):
    """Named fields passed to Megatron-Core's own dataclasses; names and types are checked against them."""

    transformer: Passed = Field(default_factory=dict, description="TransformerConfig fields.")
    optimizer: Passed = Field(default_factory=dict, description="OptimizerConfig fields.")
    ddp: Passed = Field(default_factory=dict, description="DistributedDataParallelConfig fields.")


class OptimizerConfig(Section):
    """Adam and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in training steps.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam's beta1, beta2.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient-norm clip; 0 = off.")
    distributed: bool = Field(True, description="Megatron's distributed optimizer (state sharded over DP).")


class TrainerConfig(Section):
    """The trainer ranks."""

    gpus: int = Field(1, ge=1, description="Trainer ranks = torchrun's world size (processes on CPU).")
    gpus_per_node: int | None = Field(None, ge=1, description="Trainer GPUs on each node; default: all on one node.")
    devices: list[int] | None = Field(None, description="GPU indices of the trainer on each node.")
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of each trainer GPU for the plan, GiB; default: that of this machine's GPU 0.",
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: Literal["bf16", "fp32"] = Field("bf16", description="Compute precision; master weights stay fp32.")
    micro_batch_tokens: int = Field(8192, ge=1, description="Upper bound of packed tokens per micro-batch per DP rank.")
    mini_batches: int = Field(1, ge=1, description="Optimizer updates per step (the batch is split by groups).")
    logprob_chunk_tokens: int = Field(1024, ge=1, description="Rows of logits per chunk of the log-prob/entropy pass.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class ReferenceConfig(Section):
    """The frozen reference policy; it is only built if a KL coefficient is not zero."""

    path: Path | None = Field(None, description="Hugging Face directory or Megatron checkpoint; default `model.path`.")
    placement: Literal["gpu", "cpu_offload"] = Field(
        "cpu_offload", description="Where its weights live between passes."
    )


class KLConfig(Section):
    """KL to the reference policy."""

    coef: float = Field(0.0, ge=0, description="Coefficient; 0 = no reference pass at all.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or subtracted from the reward.")


class OverlongConfig(Section):
    """DAPO's soft overlong punishment."""

    buffer_tokens: int = Field(0, ge=0, description="Length of the punished tail below `sampling.max_tokens`; 0 = off.")
    penalty: float = Field(1.0, ge=0, description="Penalty at full length.")


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="grpo: (r-mean)/std; dr_grpo: r-mean; rloo: leave-one-out baseline."
    )
    loss: Literal["ppo", "gspo"] = Field("ppo", description="Token-level PPO clip, or GSPO's sequence ratio.")
    clip_low: float = Field(0.2, ge=0, description="Lower clip: ratio >= 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="Upper clip: ratio <= 1 + clip_high.")
    clip_dual: float | None = Field(None, gt=1, description="Dual clip c for negative advantages; null = off.")
    kl: KLConfig = Field(default_factory=KLConfig)
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        "token_mean", description="How token losses become one number, by global counts of the mini-batch."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus coefficient.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    filter_zero_variance: bool = Field(True, description="Drop (and count) groups whose rewards are all equal.")
    permute_rewards: bool = Field(
        False,
        description="Control experiment: shuffle the rewards inside each group, so nothing can be learnt.",
    )
    old_logprobs: Literal["rollout", "trainer"] = Field(
        "rollout", description="Old log-probs: the engine's own, or recomputed by the trainer."
    )


class BatchConfig(Section):
    """How much one training step takes."""

    groups: int = Field(..., ge=1, description="Prompt groups per step.")
    samples_per_group: int = Field(..., ge=2, description="Responses per prompt (n).")


class SamplingConfig(Section):
    """How training responses are sampled."""

    temperature: float = Field(1.0, gt=0, description="Temperature; the trainer divides its logits by it too.")
    max_tokens: int = Field(..., ge=1, description="Upper bound of response tokens, EOS included.")
    top_p: float = Field(1.0, description="Must be 1 in training: the trainer cannot see the kept set.")
    top_k: int = Field(-1, description="Must be -1 in training.")
    min_p: float = Field(0.0, description="Must be 0 in training.")
    repetition_penalty: float = Field(1.0, description="Must be 1 in training.")
    presence_penalty: float = Field(0.0, description="Must be 0 in training.")
    frequency_penalty: float = Field(0.0, description="Must be 0 in training.")
    stop_token_ids: list[int] | None = Field(None, description="Default: generation config and chat template.")
    truncated: Literal["keep", "mask", "zero_reward"] = Field(
        "keep", description="Responses cut at max_tokens: train as they are, mask from the loss, or reward 0."
    )


class EvalSamplingConfig(Section):
    """Sampling of the `sampled` evaluation; `greedy` is temperature 0."""

    temperature: float = Field(1.0, gt=0, description="Temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="Top-k; -1 = off.")
    repetition_penalty: float = Field(1.0, gt=0, description="Repetition penalty.")
    samples: int = Field(1, ge=1, description="Responses per prompt; accuracy is their mean.")


class EvalSetConfig(Section):
    """One held-out set; formats and chat template as in `data`."""

    name: str = Field(..., description="Name in metrics and tables.")
    path: Path = Field(..., description="JSONL or Parquet file.")
    limit: int | None = Field(None, ge=1, description="Only the first so many problems.")


class EvaluationConfig(Section):
    """Held-out evaluation on the rollout pool, greedy and sampled; `summary.json` shows the first set."""

    sets: list[EvalSetConfig] = Field(default_factory=list, description="Held-out sets; empty = no evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 = only before and after.")
    max_tokens: int | None = Field(None, ge=1, description="Default `sampling.max_tokens`.")
    sampling: EvalSamplingConfig = Field(default_factory=EvalSamplingConfig)


class DataConfig(Section):
    """Prompts."""

    path: Path = Field(..., description="JSONL or Parquet file.")
    format: Literal["auto", "gsm8k", "problem_answer", "fields"] = Field(
        "auto", description="auto recognises GSM8K (question/answer with ####) and problem/answer files."
    )
    prompt_field: str = Field("prompt", description="With `fields`: a string, or a list of chat messages.")
    answer_field: str = Field("answer", description="With `fields`: the reference answer.")
    system_prompt: str | None = Field(None, description="Prepended as a system message.")
    suffix: str = Field("", description="Appended to every user message, e.g. an answer-format instruction.")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longer prompts are an error or skipped; default: what engine and micro-batch have room for.",
    )
    overlong_prompts: Literal["error", "skip"] = Field("error", description="What to do with longer prompts.")
    shuffle: bool = Field(True, description="Seeded order, new each epoch.")


class RewardConfig(Section):
    """The reward function, run in killable processes."""

    function: str = Field("math", description="`gsm8k`, `math`, or an import path `package.module:function`.")
    kwargs: Passed = Field(default_factory=dict, description="Keyword arguments bound to the function.")
    workers: int = Field(1, ge=1, description="Reward processes.")
    timeout_s: float = Field(10.0, gt=0, description="Seconds per sample; then its process is killed.")
    on_error: float = Field(0.0, description="Reward of a sample whose function hung or raised.")


class RolloutConfig(Section):
    """The pool of vLLM engines."""

    replicas: int = Field(1, ge=1, description="Number of engines.")
    tensor_parallel: int = Field(1, ge=1, description="GPUs per engine; never beyond one node.")
    gpus_per_node: int | None = Field(None, ge=1, description="Rollout GPUs on each node; default: all on one node.")
    devices: list[int] | None = Field(None, description="GPU indices of the pool on each node.")
    nodes: Literal["auto", "shared", "separate"] = Field(
        "auto",
        description="Whether the pool lives on the trainer's nodes; auto: separate if `gpus_per_node` is "
        "given for both pools and `devices` for neither, otherwise shared.",
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of each rollout GPU for the plan, GiB; default: that of this machine's GPU 0.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Prompt + response tokens; default: what data and sampling need."
    )
    max_num_seqs: int = Field(256, ge=1, description="Concurrent sequences per engine.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="vLLM's share of each GPU.")
    cpu_kv_cache_gib: int = Field(1, ge=1, description="KV cache per engine without a GPU, GiB.")
    enforce_eager: bool | None = Field(None, description="Default: true without a GPU.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: as trainer.precision.")
    on_group_failure: Literal["count", "stop"] = Field(
        "count",
        description="A prompt group that cannot be generated or judged: count it as failed, or end the run. It ends in "
        "any case when no engine is left, or when as many groups in a row have failed as a step has.",
    )
    engine_kwargs: Passed = Field(default_factory=dict, description="Further AsyncEngineArgs fields.")


class AdmissionConfig(Section):
    """How far generation may run ahead of the weights."""

    max_staleness: int = Field(0, ge=0, le=0, description="0 = synchronous (the only policy so far).")


class WeightSyncConfig(Section):
    """Trainer to engines."""

    bucket_mb: float = Field(64.0, gt=0, description="Bucket size, MiB.")
    transport: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, gloo without.")
    recompute_kv: bool = Field(True, description="Recompute KV caches of in-flight requests after a sync.")
    restarts: int = Field(
        1, ge=0, description="Times a failed sync is repeated, with fresh replicas for those it left unusable."
    )


class QueueConfig(Section):
    """TransferQueue."""

    storage_units: int = Field(1, ge=1, description="Storage actors, on the pool's nodes only.")


class TelemetryConfig(Section):
    """What a run writes besides `metrics.jsonl` and `summary.json`."""

    samples_per_step: int = Field(4, ge=0, description="Trajectories per step written to `samples.jsonl`.")
    tensorboard: bool = Field(True, description="Write TensorBoard events to `RUN_DIR/tensorboard`.")
    wandb_project: str | None = Field(None, description="Weights & Biases project; null = off.")
    dump_batches: bool = Field(False, description="Keep whole batches in `RUN_DIR/batches` for `megarl replay`.")


class CheckpointConfig(Section):
    """Saving and resuming a run; see docs/checkpoints.md."""

    dir: Path | None = Field(None, description="Directory of the checkpoints; default `RUN_DIR/checkpoints`.")
    resume: str = Field(
        "auto",
        description="`auto`: the newest complete checkpoint of the run, if there is one; `never`: start anew (what is "
        "there moves to `RUN_DIR/previous`); or the path of a checkpoint.",
    )
    every: int = Field(
        0, ge=0, description="Steps between saves, and one after the last step; 0 = only when the run is asked to stop."
    )
    asynchronous: bool = Field(True, description="Write in the background while training goes on.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    keep_every: int = Field(0, ge=0, description="Also keep every step divisible by this; 0 = none.")
    keep_best: str | None = Field(
        None, description="Also keep the best checkpoint by this evaluation metric, e.g. `eval/heldout/greedy`."
    )
    keep_best_mode: Literal["max", "min"] = Field("max", description="Whether larger or smaller is better.")
    hf_export_every: int = Field(
        0,
        ge=0,
        description="Convert every saved step divisible by this to `RUN_DIR/hf_STEP`, in a niced child; 0 = none.",
    )


class TimeoutsConfig(Section):
    """Upper bounds of every wait, in seconds; an expired one says who waited for whom."""

    ray_start_s: float = Field(120.0, gt=0, description="Supervisor: Ray head and attach.")
    engine_start_s: float = Field(900.0, gt=0, description="Engine start, first-probe grace included.")
    rpc_s: float = Field(120.0, gt=0, description="Any other actor call.")
    generate_s: float = Field(1800.0, gt=0, description="One step's rollouts, or one evaluation.")
    queue_s: float = Field(120.0, gt=0, description="One queue read or write.")
    weight_sync_s: float = Field(600.0, gt=0, description="One weight sync.")
    collective_s: float = Field(600.0, gt=0, description="One trainer collective.")
    shutdown_s: float = Field(30.0, gt=0, description="Tear-down of everything the supervisor started.")
    save_s: float = Field(600.0, gt=0, description="One checkpoint save, from the step boundary to the disk.")
    node_s: float = Field(
        120.0, gt=0, description="Silence of a node of the job, late start included, until it is lost."
    )


class RayConfig(Section):
    """The Ray cluster of the run; by default the supervisor starts its own."""

    address: str | None = Field(
        None,
        description="Attach to a running cluster instead; its rollout nodes must offer the resources `megarl_rollout` "
        "(10000 each) and `megarl_engine` (one per engine).",
    )
    num_cpus: int | None = Field(
        None, ge=1, description="Logical CPUs of each rollout node; default: what the plan needs."
    )


class LaunchConfig(Section):
    """How a job asks its cluster for nodes and what it does at its time limit; read by `megarl launch` only."""

    time_limit: str | None = Field(
        None,
        pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$",
        description="`[D-]HH:MM:SS` of one allocation; default: the partition's.",
    )
    stop_before_s: int | None = Field(
        None,
        ge=1,
        description="Seconds before the time limit (and after a SIGTERM) that the run gets for ending its step and "
        "saving; default `timeouts.save_s` + 300.",
    )
    requeue: bool = Field(True, description="Queue the job again when it was stopped by its time limit.")
    max_restarts: int = Field(0, ge=0, description="Times torchrun restarts the ranks after a failure.")
    node_gpus: int | None = Field(None, ge=1, description="GPUs to ask for on each node; default: those used there.")
    node_cpus: int | None = Field(
        None, ge=1, description="CPUs to ask for on each node; default: all of an exclusive one."
    )
    sbatch: list[str] = Field(
        default_factory=list, description="Further #SBATCH options, e.g. `--account=x`, `--partition=y`."
    )
    setup: list[str] = Field(
        default_factory=list, description="Shell lines before anything else, e.g. `module load x`."
    )
    interface: str | None = Field(
        None, description="Network interface between the nodes; default: the one on the way to the other nodes."
    )
    runtime_env: Path | None = Field(
        None, description="YAML with `env_vars`, set for every process of the job (launch/runtime_env.yaml)."
    )


class Config(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    batch: BatchConfig
    sampling: SamplingConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def run_dir(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a reference policy."""
        return self.algorithm.kl.coef > 0

    @property
    def checkpoint_dir(self) -> Path:
        return self.checkpoint.dir or self.run_dir / "checkpoints"
