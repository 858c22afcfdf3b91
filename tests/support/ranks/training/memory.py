"""The memory of one rank of a test world when the trainer is really built: bytes, by kind."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.config.derived.pools import trainer_layout
from megarl.config.loading.load import config_from_tree
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy
from tests.support.losses.samples import train_sample
from tests.support.measures.live_bytes import LiveBytes
from tests.support.ranks.training.policy import built_policy

# One micro-batch of ragged sequences, exactly full, and with only one way to pack several of them.
LENGTHS = (144, 48)
TOKENS = sum(LENGTHS)


def measure(tree: dict[str, Any], micro_batches: int = 1) -> dict[str, float]:
    """Build the policy of a config, do one update, and return this rank's bytes (and its pipeline stage)."""
    config = config_from_tree(tree)
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    with built_policy(config, layout) as policy:
        samples = [_sample(i, length) for i, length in enumerate(LENGTHS * micro_batches)]
        with SavedBytes(policy) as saved:
            policy.update(samples)
        stage = torch.distributed.get_rank(parallel_state.get_pipeline_model_parallel_group())
        return {"stage": stage, "activations": saved.peak, **_state(policy)}


def forward_peak(tree: dict[str, Any]) -> int:
    """Build the policy of a config, and return the most bytes that live at one time in a log-prob pass."""
    config = config_from_tree(tree)
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    with built_policy(config, layout, chunk=1) as policy:
        samples = [_sample(i, length) for i, length in enumerate(LENGTHS)]
        with LiveBytes() as live:
            policy.compute_logprobs(samples)
        return live.peak


def _sample(index: int, length: int) -> TrainSample:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 90, (length,), generator=generator).tolist()
    return train_sample(str(index), ids[:4], ids[4:], 1.0 - index % 3, old_logprobs=torch.full((length - 4,), -3.0))


def _state(policy: Policy) -> dict[str, float]:
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in _parameters(policy)}
    buffers = [b for chunk in policy.module_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    held: dict[int, int] = {}
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = optimizer.optimizer
        tensors = [p for group in inner.param_groups for p in group["params"]]
        tensors += [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
        held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(size for pointer, size in held.items() if pointer not in weights),
    }


def _parameters(policy: Policy) -> list[torch.nn.Parameter]:
    return [p for chunk in policy.module_chunks for p in chunk.parameters()]


class SavedBytes:
    """Peak bytes of the storages that autograd keeps for backward, each counted once, parameters left out."""

    def __init__(self, policy: Policy) -> None:
        self._ignored = {p.untyped_storage().data_ptr() for p in _parameters(policy)}
        self._uses: dict[int, int] = {}
        self._now = 0
        self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer not in self._ignored:
            if not self._uses.get(pointer):
                self._now += size
                self.peak = max(self.peak, self._now)
            self._uses[pointer] = self._uses.get(pointer, 0) + 1
            weakref.finalize(box, self._release, pointer, size)
        return box

    def _release(self, pointer: int, size: int) -> None:
        self._uses[pointer] -= 1
        if not self._uses[pointer]:
            self._now -= size


class _Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
