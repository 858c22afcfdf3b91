"""A method of vLLM's worker that replaces its model's weights by those of a file."""

from typing import Any


class LoadedWeights:
    """Added to the worker by `worker_extension_cls`."""

    model_runner: Any

    def load_file(self, path: str) -> int:
        """Load a safetensors file in place; return the number of its tensors."""
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights = load_file(path)
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, self.model_runner.model_config)
        return len(weights)
