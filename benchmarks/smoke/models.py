"""Models, samples and policies of the smoke test, and the process group of one rank.

Shape suffixes: R response tokens, V vocabulary.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.random_model import make_model

if TYPE_CHECKING:  # megarl's modules are imported after `platforms.activate`
    from megarl.config.schema import Config
    from megarl.trainer.batch import TrainSample
    from megarl.trainer.policy import Policy

VOCABULARY = 512
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}  # fmt: skip
# A layer of Qwen3-8B; its vocabulary, and so few layers that weights, gradients and Adam's state fit 80 GB.
LAYER_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}  # fmt: skip
Pairs = list[tuple[list[int], list[int]]]


def small_model(directory: Path, *, family: str = "dense", **sizes: float) -> None:
    """Write a small random model whose log-probs differ from token to token. `family`: dense, moe or delta."""
    # Qwen3.5's size of a head, which has kernels of its own. DeltaNet layers amplify bf16 rounding more.
    own = {"head_dim": 256, "initializer_range": 0.06} if family == "delta" else {"initializer_range": 0.1}
    sizes = {**SMALL, **own, **sizes}
    make_model(directory, moe=family == "moe", delta=family == "delta", **sizes)


def write_config(directory: Path, sizes: dict[str, int]) -> None:
    """Write a Qwen3's config.json only, for a policy with random weights."""
    from transformers import Qwen3Config

    directory.mkdir(parents=True, exist_ok=True)
    content = Qwen3Config(**sizes, tie_word_embeddings=False).to_dict()
    (directory / "config.json").write_text(json.dumps({**content, "architectures": ["Qwen3ForCausalLM"]}))


def make_pairs(count: int, lengths: range, vocabulary: int = VOCABULARY) -> Pairs:
    """Return `count` pairs of prompt and response token ids; the responses have the lengths in turn."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(1, vocabulary, (n,), generator=generator).tolist()  # noqa: E731
    return [(draw(4 + i % 7), draw(lengths[i % len(lengths)])) for i in range(count)]


def reference_logprobs(directory: Path, pairs: Pairs) -> list[torch.Tensor]:
    """Return each response's log-probs, float32 [R], by transformers in fp32 on the CPU.

    Has to be called before a platform is activated.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    with torch.no_grad():
        for prompt, response in pairs:
            logits_RV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            results.append(logits_RV.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return results


def make_samples(pairs: Pairs, old: list[torch.Tensor] | None = None) -> list[TrainSample]:
    """Return training samples with advantages of alternating sign. `old`: their log-probs (default: about uniform)."""
    from megarl.trainer.batch import TrainSample

    samples = []
    for i, (prompt, response) in enumerate(pairs):
        logprobs_R = torch.full((len(response),), -6.0) if old is None else old[i]
        sample = TrainSample(str(i), prompt, response, streams={"old_logprobs": logprobs_R})
        sample.set_advantage((-1.0) ** i)
        samples.append(sample)
    return samples


def free_address() -> str:
    """Return `tcp://127.0.0.1:PORT` with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def join(address: str, rank: int, size: int, *, backend: str | None = None) -> None:
    """Activate the platform and join the default process group (default backend: the platform's)."""
    from megarl import platforms

    platform = platforms.activate()
    if platform.is_cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(backend or platform.backend, init_method=address, rank=rank, world_size=size)


def make_config(directory: Path, **changes: dict[str, Any]) -> Config:
    """Return the config of a one-rank trainer on the model in `directory`; `changes` are merged by section."""
    from megarl.config.schema import Config

    tree: dict[str, Any] = {
        "run": {"steps": 1000, "dir": directory / "run"},
        "model": {"path": directory},
        "trainer": {"micro_batch_tokens": 1024, "optimizer": {"lr": 1e-3}},
        "batch": {"groups": 8, "samples_per_group": 4},
        "sampling": {"max_tokens": 1024},
        "data": {"path": __file__},  # any file: its identity is recorded in checkpoints
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return Config.model_validate(tree)


@contextmanager
def built_policy(config: Config, tensor: int = 1) -> Iterator[Policy]:
    """Build the policy of `config` on `tensor` ranks; afterwards the layout can be built again."""
    import gc

    from megarl.models.hf.read_config import load_info
    from megarl.models.megatron.layout import Layout
    from megarl.trainer import parallel
    from megarl.trainer.policy import Policy

    layout = Layout(tensor=tensor, world_size=tensor)
    parallel.initialize(layout, seed=0, timeout_s=300)
    policy = Policy(config, layout, load_info(config.model.path))
    try:
        yield policy
    finally:
        del policy
        gc.collect()
        parallel.destroy()
