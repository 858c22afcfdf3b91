"""A real vLLM model in this process, without an engine: its modules, its loaders and its processing after a load."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.live_engine import ENVIRONMENT
from megarl.common.process import no_torchvision
from megarl.models.hf.model_files import raw_config
from megarl.rollout.engine.engine_args import has_states
from megarl.weights.receive import cpu_delta_net


@contextmanager
def vllm_model(directory: Path, *, packed: bool = False, **engine_args: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield (model, ModelConfig) for the config.json in `directory`, TP1 on CPU, with random weights.

    `packed`: with the packing of weights for CPU kernels, which changes their layout. vLLM's groups are global, so
    there is one such model at a time.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if has_states(raw_config(directory)):  # as the plugin does in an engine
        no_torchvision.apply()
        cpu_delta_net.install()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import process_weights_after_loading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry

    # Where nothing is cached, vLLM inspects each class in a new process, which imports vLLM again.
    for name in json.loads((directory / "config.json").read_text())["architectures"]:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())

    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True}
    config = EngineArgs(model=str(directory), **(arguments | engine_args)).create_engine_config()
    with tempfile.TemporaryDirectory() as rendezvous, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel(1, 1)
            with unpacked(not packed):
                model = initialize_model(config)
                for parameter in model.parameters():
                    parameter.data.normal_(0.0, 0.1)
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
                yield model, config.model_config
        finally:
            parallel_state.cleanup_dist_env_and_memory()


@contextmanager
def unpacked(on: bool = True) -> Iterator[None]:
    """Switch off the packing of weights for CPU kernels: linear layers by torch, experts keep vLLM's own layout."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if not on:
        yield
        return
    before = _custom_ops._supports_onednn, CPUUnquantizedExperts.process_weights_after_loading
    _custom_ops._supports_onednn = False
    del CPUUnquantizedExperts.process_weights_after_loading
    try:
        yield
    finally:
        _custom_ops._supports_onednn, CPUUnquantizedExperts.process_weights_after_loading = before
