"""One small RL mini-batch for the layout tests, and what plain transformers + PyTorch make of it.

Everything that could hide a mistake is in it: ragged lengths, masked tokens and a wholly masked sample, a
temperature other than 1, old log-probs away from the policy's, KL, entropy, a vocabulary that TP does not divide.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.trainer.batch import TrainSample
from tests.support.losses.loss_batches import Batch, LossSpec
from tests.support.losses.padded_loss import reference_result
from tests.support.losses.samples import advantage_of, train_sample
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import with_changes

VOCAB = 101
TEMPERATURE = 0.8
KL, ENTROPY, CLIP, MAX_TOKENS = 0.05, 0.02, 0.2, 24
LAYERS = 4

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {}),
    "biased": ("qwen2", {}),
    "llama": ("llama", {}),
    "latent": ("deepseek_v3", {}),
    "window": ("mistral", {"sliding_window": 6}),
    "delta": ("qwen3_5", {}),
    "delta_moe": ("qwen3_5_moe", {}),
    "delta_next": ("qwen3_next", {}),
    # Few enough experts that each gets tokens.
    "glm": ("glm4_moe", {"n_routed_experts": 4}),
    "glm_lite": ("glm4_moe_lite", {"n_routed_experts": 4}),
}


def dense_dims(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "num_hidden_layers": LAYERS} | changes


def rl_models(root: Path) -> Callable[[str], Path]:
    """A function from a name of MODELS to the directory of that model below `root`; each is written once."""

    @cache
    def make(name: str) -> Path:
        family, dims = MODELS[name]
        return make_tiny_model(root / name, family, **dense_dims(**dims))

    return make


def rl_samples(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    """A function from a name of MODELS to that model's samples; they are made once."""
    return cache(lambda name: make_samples(model_dir(name)))


def make_samples(model_dir: Path, count: int = 11, seed: int = 3) -> list[TrainSample]:
    """Ragged samples whose old and reference log-probs lie around the model's own."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for number in range(count):
        prompt, response = integer(1, 9), integer(1, MAX_TOKENS + 1)
        # Not id 0: transformers gives its padding token no embedding gradient.
        ids = torch.randint(1, VOCAB, (prompt + response,), generator=generator).tolist()
        mask = torch.rand(response, generator=generator) > 0.1
        if number == 2:
            mask[:] = False
        advantage = float(torch.randn(1, generator=generator))
        samples.append(train_sample(f"0:{number}", ids[:prompt], ids[prompt:], advantage, loss_mask=mask))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for sample in samples:
            own, _ = plain_logprobs(model, sample)
            noise = lambda scale: scale * torch.randn(own.shape, generator=generator)  # noqa: E731
            sample.streams["old_logprobs"] = own + noise(0.3)
            sample.streams["reference_logprobs"] = own + noise(0.2)
    return samples


def make_config(model_dir: Path, **changes: Any) -> Config:
    """`changes` are dotted keys with `__` for the dots."""
    fields: dict[str, Any] = {
        "run": {"steps": 10},
        "model": {"path": model_dir},
        "trainer": {
            "precision": "fp32",
            "micro_batch_tokens": 64,
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0, "eps": 1e-6, "weight_decay": 0.1},
        },
        "algorithm": {
            "kl": {"coef": KL},
            "entropy_coef": ENTROPY,
            "loss_options": {"clip_low": CLIP, "clip_high": CLIP},
        },
        "batch": {"groups": 4, "samples_per_group": 2},
        "sampling": {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS},
        "data": {"path": "unused"},
    }
    return Config(**with_changes(fields, changes))


def plain_logprobs(model: torch.nn.Module, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens, one unpadded sequence at a time."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float() / TEMPERATURE
    log_p = torch.log_softmax(logits, dim=-1)
    targets = torch.tensor(sample.response_ids)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def plain_loss(model: torch.nn.Module, samples: list[TrainSample]) -> torch.Tensor:
    """Token-mean clipped PPO + k3 KL - entropy bonus, written out."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        assert sample.loss_mask_R is not None
        logprobs, entropy = plain_logprobs(model, sample)
        ratio = (logprobs - sample.streams["old_logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage_of(sample), clipped * advantage_of(sample))
        difference = sample.streams["reference_logprobs"] - logprobs
        loss = loss + KL * (difference.exp() - difference - 1) - ENTROPY * entropy
        total = total + (loss * sample.loss_mask_R).sum()
        tokens += int(sample.loss_mask_R.sum())
    return total / tokens


def plain_gradients(model_dir: Path, samples: list[TrainSample]) -> dict[str, torch.Tensor]:
    """Gradient of `plain_loss` by Hugging Face parameter name, split per expert as the files are."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return plain_gradients_of(model, plain_loss(model, samples))


def plain_gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of any loss of a transformers model by parameter name, split per expert as the files are."""
    loss.backward()
    return _gradients(model)


def padded_gradients(
    model_dir: Path, samples: list[TrainSample], spec: LossSpec
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and parameter gradients of any objective, by the padded reference of `padded_loss`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logprobs, entropy = zip(*(plain_logprobs(model, sample) for sample in samples), strict=True)
    masks = [torch.ones(len(s.response_ids)) if s.loss_mask_R is None else s.loss_mask_R for s in samples]
    batch = Batch(
        logprobs=[values.detach().double() for values in logprobs],
        old=[_double(sample.streams["old_logprobs"]) for sample in samples],
        reference=[_double(sample.streams["reference_logprobs"]) for sample in samples],
        entropy=[values.detach().double() for values in entropy],
        mask=[mask.bool() for mask in masks],
        advantages=[advantage_of(sample) for sample in samples],
        rollout=[_double(s.streams["rollout_logprobs"]) for s in samples if "rollout_logprobs" in s.streams],
    )
    result = reference_result(batch, spec)
    parts = [value.float() for value in result.gradient + result.entropy_gradient]
    torch.autograd.backward([*logprobs, *entropy], parts)
    return result.loss, _gradients(model)


def _double(values: torch.Tensor | None) -> torch.Tensor:
    assert values is not None
    return values.double()


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(grad):
                gate, up = both.chunk(2)
                prefix = name.removesuffix("gate_up_proj") + f"{expert}."
                gradients |= {prefix + "gate_proj.weight": gate, prefix + "up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(grad):
                gradients[name.removesuffix("down_proj") + f"{expert}.down_proj.weight"] = down
        else:
            gradients[name] = grad
    return gradients
