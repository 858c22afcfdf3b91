"""Tiny models and a real tokenizer for tests: random weights with std >= 0.1, so that mistakes show.

`make_tiny_model(dir, family="qwen3")` writes a Hugging Face directory (config, safetensors, generation
config, tokenizer with a chat template) that `transformers`, vLLM and megarl all load.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

PAD, EOS, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES: dict[str, tuple[type, type]] = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
# The only size of latent attention that vLLM has a CPU kernel for: the published one.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # with Gated DeltaNet layers


def make_tiny_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A character-level `tokenizers` tokenizer (printable ASCII and newline; anything else is <unk>)."""
    symbols = [PAD, START, EOS, "<unk>", "\n", *map(chr, range(32, 127))]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token="<unk>",
        additional_special_tokens=[START],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return fast


def _dims(family: str, vocab_size: int, overrides: dict[str, Any]) -> dict[str, Any]:
    dims: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
    }
    # vLLM's CPU attention takes head sizes 32, 64, 96, 128, ... only.
    dims["head_dim"] = 32
    if family == "qwen2":
        del dims["head_dim"]
        dims["hidden_size"] = 128
    if family == "glm4_moe":
        dims |= {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        }
    if family in ("deepseek_v3", "glm4_moe_lite"):
        dims |= {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "num_mtp_layers": 0,
            # Not fields of transformers' class, which keeps them; without them vLLM chooses other experts.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        }
        del dims["head_dim"]
    if family == "glm4_moe_lite":
        dims |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    if family == "mistral":
        dims["sliding_window"] = None
    if family == "mixtral":
        dims |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    if family == "qwen3_moe":
        dims |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if family in DELTA:
        dims |= {
            "layer_types": ["linear_attention", "full_attention"] * 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        }
    if family in ("qwen3_5_moe", "qwen3_next"):
        dims |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        }
    dims |= overrides
    if "layer_types" in dims:
        dims["layer_types"] = dims["layer_types"][: dims["num_hidden_layers"]]
    return dims


def make_tiny_model(
    directory: Path | str, family: str = "qwen3", *, seed: int = 0, std: float = 0.1, **dims: Any
) -> Path:
    """Write a random fp32 model of `family` (a key of FAMILIES); returns its directory.

    Matrices are normal(0, std); norm weights 1 + normal(0, std); biases normal(0, std): nothing stays at a
    default that would hide a forgotten term. `dims` override fields of the Hugging Face config.
    """
    key = repr((family, seed, std, sorted(dims.items())))
    if key not in _WRITTEN:
        kept = Path(_KEPT.name) / str(len(_WRITTEN))
        _write_tiny_model(kept, family, seed, std, dims)
        _WRITTEN[key] = kept
    return Path(shutil.copytree(_WRITTEN[key], directory, dirs_exist_ok=True))


# Models that this process has written: many tests want the same one, and a copy takes a fraction of the time.
_KEPT = tempfile.TemporaryDirectory(prefix="tiny-models-", ignore_cleanup_errors=True)
_WRITTEN: dict[str, Path] = {}


def _write_tiny_model(directory: Path, family: str, seed: int, std: float, dims: dict[str, Any]) -> None:
    directory.mkdir()
    tokenizer = make_tiny_tokenizer(directory)
    config_class, model_class = FAMILIES[family]
    # A multiple of 8 so that TP 2 and 4 divide it; the ids beyond the tokenizer's are never text.
    vocab_size = (len(tokenizer) + 7) // 8 * 8
    config = config_class(
        **_dims(family, dims.get("vocab_size", vocab_size), dims),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
        torch_dtype=torch.float32,
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, std)
                if "norm" in name and (family not in DELTA or "linear_attn" in name):
                    parameter.add_(1.0)
                if name.endswith("A_log"):
                    parameter.uniform_(-3.0, 1.0)  # decays of all speeds
                if name.endswith("dt_bias"):
                    parameter.uniform_(-2.0, 1.0)
                if "conv1d" in name:
                    parameter.mul_(3.0)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, std)
    finally:
        torch.random.set_rng_state(state)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=[config.eos_token_id], pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
