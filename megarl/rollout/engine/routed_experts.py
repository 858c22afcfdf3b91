"""Lets an engine without vLLM's runner V2, such as one on a CPU, return the experts of its tokens.

vLLM 0.32 connects its capture (`distributed/aux_output_connector`) only to runner V2. Here the same objects get the
batches of runner V1. They keep the experts of cached prefixes, chunked prompts and preempted requests, and drop them
when the cache is reset. The front end works as on a GPU. Only an engine's process imports this module.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler


class ExpertsScheduler(Scheduler):  # type: ignore[misc]  # without vLLM's types it is Any
    """vLLM's scheduler, which also expects the experts of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # vLLM's
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


class ReturnsRoutedExperts:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    model_runner: Any

    def return_routed_experts(self) -> None:
        """Make the worker return the experts of each step. Call it once, before the first request."""
        runner = self.model_runner
        connector = get_aux_output_connector(runner.get_model(), runner.vllm_config, runner.kv_cache_config)
        _hold_whole_requests(connector, runner.vllm_config)
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(scheduled: Any, *args: Any) -> Any:  # noqa: ANN401
            connector.begin_step(scheduled.aux_output_connector_metadata)
            return execute(scheduled, *args)

        def sample_tokens(grammar: Any) -> Any:  # noqa: ANN401
            if runner.execute_model_state is None:
                return sample(grammar)
            requests = len(runner.input_batch.req_ids)
            # Copies, because sampling changes the batch.
            pending = connector.prepare_output(
                SimpleNamespace(
                    req_ids=list(runner.input_batch.req_ids),
                    query_start_loc_np=runner.query_start_loc.np[: requests + 1].copy(),
                    num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:requests].copy(),
                )
            )
            output = sample(grammar)
            if pending is not None:
                sampled = {name: len(output.sampled_token_ids[at]) for name, at in output.req_id_to_index.items()}
                counts = np.array([sampled[name] for name in pending.request_ids])
                pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
                output.aux_output_connector_output = pending.process_output()
            return output

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _hold_whole_requests(connector: Any, config: Any) -> None:  # noqa: ANN401  # vLLM's
    """Give the experts of all running tokens room if there is no prefix cache, as with latent attention on a CPU.

    vLLM moves a full block out of its buffer once the block has a hash, which only the prefix cache makes.
    """
    buffer, seqs = connector._buffer, config.scheduler_config.max_num_seqs
    if buffer is not None and not config.cache_config.enable_prefix_caching:
        tokens = seqs * config.model_config.max_model_len
        connector._buffer = RoutedExpertsBuffer(
            buffer.dtype, buffer.shape_per_token, buffer.block_size, seqs, tokens, 1
        )
