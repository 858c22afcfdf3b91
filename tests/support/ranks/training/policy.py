"""The work of one rank of a test world with a policy: updates and log-probs under a layout, and numbers back."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.algorithms.objective.objective import WEIGHT_STREAMS, GlobalCounts, LossFunction
from megarl.config.schema import LOGPROB_CHUNK_ROWS, Config
from megarl.models.hf.export import HFExporter
from megarl.models.hf.read_config import load_info
from megarl.models.megatron import delta_net
from megarl.models.megatron.layout import Layout
from megarl.models.megatron.shards import local_shards, table
from megarl.trainer import parallel
from megarl.trainer import policy as policy_module
from megarl.trainer.batch import TrainSample
from megarl.trainer.packing import assign_to_ranks
from megarl.trainer.policy import Policy
from tests.support.losses.rl_problem import make_config
from tests.support.losses.samples import with_streams, without_stream
from tests.support.ranks.models.layouts import make_layout, use_layout


@contextlib.contextmanager
def built_policy(
    config: Config, layout: Layout, seed: int = 1, loss: LossFunction | None = None, chunk: int = LOGPROB_CHUNK_ROWS
) -> Iterator[Policy]:
    """The policy of a config in a fresh layout; torn down again, so that the next one finds nothing of it."""
    with use_layout(layout, seed), mock.patch.object(policy_module, "LOGPROB_CHUNK_ROWS", chunk):
        policy = Policy(config, layout, load_info(config.model.path), loss)
        try:
            yield policy
        finally:
            _forget_last_graph(policy)


def _forget_last_graph(policy: Policy) -> None:
    """MoE layers keep tensors of the last forward pass. Their graph holds DDP's hooks where gc cannot see them.

    Without this, each mixture of experts would leave a model and some 16 process groups of three threads behind.
    """
    for chunk in policy.module_chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.token_dispatcher.__dict__.clear()


def policy_under(
    model_dir: Path, layout: dict[str, Any], loss: LossFunction | None = None, **changes: Any
) -> contextlib.AbstractContextManager[Policy]:
    """The policy of a tiny model in a layout of all ranks; `changes` to its config have `__` for the dots."""
    return built_policy(make_config(model_dir, **changes), make_layout(**layout), loss=loss, chunk=7)


def own_share(samples: list[TrainSample]) -> tuple[list[int], list[TrainSample]]:
    indices = assign_to_ranks([s.length for s in samples], parallel.dp_size())[parallel.dp_rank()]
    return indices, [samples[index] for index in indices]


def exported(policy: Policy, chunks: list[torch.nn.Module] | None = None) -> dict[str, torch.Tensor]:
    """This rank's share of the model, or of another one like it, under Hugging Face names."""
    exporter = HFExporter(chunks or policy.module_chunks, policy.info, torch.float32)
    return {item.name: value.clone() for item, value in exporter.stream() if value is not None}


@torch.no_grad()
def exported_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The reduced gradients of what is trained under Hugging Face names; with a distributed optimizer its shards are
    joined first."""
    for chunk in policy.module_chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    # Not by `parameter.data = main_grad`: a change of dtype would remove DDP's hooks, and no later update would reduce.
    stand_ins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    places = [
        (module, name, parameter)
        for chunk in policy.module_chunks
        for module in chunk.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    shards = local_shards(policy.module_chunks, policy.info, table(policy.info))
    fixed = {name for shard in shards for name in shard.entry.names if not shard.parameter.requires_grad}
    for module, name, parameter in places:
        if parameter not in stand_ins:
            gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
            stand_ins[parameter] = torch.nn.Parameter(gradient, requires_grad=False)
            stand_ins[parameter].__dict__.update(parameter.__dict__)  # which of them are sharded, and how
        module._parameters[name] = stand_ins[parameter]
    buffers = {name for entry in table(policy.info).values() if entry.rule.buffer for name in entry.names}
    gradients = {name: value for name, value in exported(policy).items() if name not in buffers | fixed}
    for module, name, parameter in places:
        module._parameters[name] = parameter
    return gradients


def replicated(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], summed: bool
) -> dict[str, torch.Tensor]:
    """What tensor ranks share, after an update. Not `summed`: a DeltaNet layer's norm has the gradient of own heads."""
    own = mock.patch.object(delta_net, "copy_to_tensor_model_parallel_region", lambda tensor, group: tensor)
    with contextlib.nullcontext() if summed else own, policy_under(model_dir, layout) as policy:
        policy.update(own_share(samples)[1])
        shards = local_shards(policy.module_chunks, policy.info, table(policy.info))
        return {each.name: each.parameter.detach().clone() for each in shards if each.entry.rule.axis is None}


def one_each(
    lengths_per_rank: list[list[int]], max_tokens: int, multiple_of: int = 1, minimum: int = 1, patches: object = None
) -> list[list[list[int]]]:
    """Instead of `plan_micro_batches`: no packing at all, and empty micro-batches wherever a replica has fewer."""
    number = max([minimum, *map(len, lengths_per_rank)])
    number = -(-number // multiple_of) * multiple_of
    return [[[index] if index < len(lengths) else [] for index in range(number)] for lengths in lengths_per_rank]


def train(
    model_dir: Path,
    layout: dict[str, Any],
    samples: list[TrainSample],
    steps: int = 1,
    packed: bool = True,
    watch_sends: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """`steps` updates on the same mini-batch: the first one's gradients, metrics, and the weights after the last."""
    with contextlib.ExitStack() as stack:
        if not packed:
            stack.enter_context(mock.patch.object(policy_module, "plan_micro_batches", one_each))
        if watch_sends:
            stack.enter_context(nothing_is_freed_before_it_has_left())
        loads = stack.enter_context(expert_loads())
        policy = stack.enter_context(policy_under(model_dir, layout, **changes))
        _, mine = own_share(samples)
        captured: list[dict[str, torch.Tensor]] = []
        step = policy.optimizer.step

        def capture() -> Any:
            if not captured:
                captured.append(exported_gradients(policy))
            return step()

        policy.optimizer.step = capture
        metrics = [policy.update(mine, another_follows=step + 1 < steps) for step in range(steps)]
        return {
            "gradients": captured[0],
            "metrics": metrics,
            "weights": exported(policy),
            "expert_bias": expert_biases(policy),
            "expert_load": loads,
            "keys": [sorted(policy.trained_keys), sorted(sample.key for sample in mine)],
        }


@contextlib.contextmanager
def nothing_is_freed_before_it_has_left() -> Iterator[None]:
    """RuntimeError if a stage frees a tensor before it has waited for the tensor's sending."""
    exchange, free = p2p_communication._p2p_ops, schedules.deallocate_output_tensor
    leaving: dict[int, Any] = {}

    def watched(**tensors: Any) -> Any:
        requests = exchange(**tensors)
        if "send_next" in requests:
            key, request = id(tensors["tensor_send_next"]), requests["send_next"]
            leaving[key] = request
            requests["send_next"] = SimpleNamespace(wait=lambda: (request.wait(), leaving.pop(key, None)))
        return requests

    def checked(out: Any, enabled: bool = False) -> None:
        if enabled and id(out) in leaving:
            raise RuntimeError("freed while it is being sent")
        free(out, enabled)

    with mock.patch.object(p2p_communication, "_p2p_ops", watched):
        with mock.patch.object(schedules, "deallocate_output_tensor", checked):
            yield


@contextlib.contextmanager
def expert_loads() -> Iterator[list[torch.Tensor]]:
    """Tokens per expert [layers, experts], of all ranks, that each update of the balancing biases is made from."""
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    original = module.get_updated_expert_bias
    loads: list[torch.Tensor] = []

    def recording(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        updated = original(tokens, *args, **kwargs)  # sums the tokens over all ranks in place
        loads.append(tokens.clone())
        return updated

    with mock.patch.object(module, "get_updated_expert_bias", recording):
        yield loads


def expert_biases(policy: Policy) -> dict[str, torch.Tensor]:
    """Routers' fp32 balancing biases of this stage, by layer."""
    modules = [module for chunk in policy.module_chunks for module in chunk.modules()]
    found = [m for m in modules if getattr(m, "expert_bias", None) is not None]
    return {f"layer {m.layer_number}": m.expert_bias.clone() for m in found}


def logprobs(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], reference: bool = False, **changes: Any
) -> list[tuple[int, torch.Tensor]]:
    """(index in `samples`, log-probs) of this replica's samples."""
    with policy_under(model_dir, layout, **changes) as policy:
        indices, mine = own_share(samples)
        results = policy.compute_logprobs(mine, reference=reference)
        assert [len(each_R) for each_R in results] == [len(s.response_ids) for s in mine]
        return list(zip(indices, results, strict=True))


def raised(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, FloatingPointError) as error:
        return str(error)
    return ""


def no_reference(model_dir: Path, samples: list[TrainSample]) -> str:
    with policy_under(model_dir, {}, algorithm__kl={"coef": 0.0}) as policy:
        assert policy.reference is None
        return raised(policy.compute_logprobs, samples, reference=True)


def refused(model_dir: Path, samples: list[TrainSample], what: str) -> str:
    corrected = {"algorithm__correction": {"kind": "token_tis"}}
    changes: dict[str, Any] = {
        "too_long": {"trainer__micro_batch_tokens": 8},
        "no_rollout": corrected,
        "no_proximal": {**corrected, "trainer__mini_batches": 2},  # the second update must not take its own
    }.get(what, {})
    with policy_under(model_dir, {}, **changes) as policy:
        counts = None
        if what == "counts":
            counts = GlobalCounts(tokens=1, sequences=1, max_tokens=1)
        elif what == "no_proximal":
            samples = [
                without_stream(with_streams(s, rollout_logprobs=s.streams["old_logprobs"]), "old_logprobs")
                for s in samples
            ]
        elif what == "no_old":
            samples = [without_stream(sample, "old_logprobs") for sample in samples]
        elif what == "no_reference":
            samples = [without_stream(sample, "reference_logprobs") for sample in samples]
        elif what == "nothing":
            samples = [samples[2]]
        elif what == "no_weight":
            samples = [
                with_streams(s, **{name: torch.zeros(len(s.response_ids)) for name in WEIGHT_STREAMS}) for s in samples
            ]
        return raised(policy.update, samples, counts)


def non_finite(model_dir: Path, samples: list[TrainSample], what: str) -> tuple[str, bool]:
    """Only one replica makes the NaN; all must stop."""
    changes = {"run__steps": 4, "trainer__optimizer__warmup_steps": 2}
    with policy_under(model_dir, {}, **changes) as policy:
        before = [p.detach().clone() for chunk in policy.module_chunks for p in chunk.parameters()]
        schedule = policy.scheduler.state_dict(), policy.learning_rate
        if what == "loss" and parallel.dp_rank() == 1:
            poisoned = torch.full((len(samples[0].response_ids),), float("nan"))
            samples = [with_streams(samples[0], old_logprobs=poisoned), *samples[1:]]
        if what == "gradient" and parallel.dp_rank() == 1:
            weight = next(iter(policy.module_chunks[0].parameters()))
            weight.register_hook(lambda grad: grad * float("nan"))
        message = raised(policy.update, samples)
        after = [p for chunk in policy.module_chunks for p in chunk.parameters()]
        unchanged = (policy.scheduler.state_dict(), policy.learning_rate) == schedule
        return message, unchanged and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
