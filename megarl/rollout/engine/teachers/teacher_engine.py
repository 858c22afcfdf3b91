"""TeacherEngine: one vLLM engine with fixed weights inside an async Ray actor. Token ids in, their log-probs out.

Its only state are weights read from disk, so Ray restarts a dead actor, and the next call builds its engine again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.errors import RequestFailed
from megarl.common.process.output import redirect_output
from megarl.common.rundir.private_directory import name_shared_memory
from megarl.config.derived.teachers import engine_config, scored_tokens, teacher_gpus
from megarl.config.schema import Config
from megarl.rollout.engine.engine_args import engine_args, engine_environment
from megarl.rollout.engine.engine_errors import root_cause
from megarl.rollout.engine.placement import engine_needs, starting_alone
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.teachers.scores import Scored, ScoreRequest

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MOST_CALLS = 10_000  # at once, one per group; the groups in flight bound what they hold


def teacher_name(teacher: str, number: int) -> str:
    """Return the Ray name of an engine of a teacher inside the run's namespace."""
    return f"teacher-{teacher}-{number}"


def create_teacher(spec: ReplicaSpec, teacher: str, number: int) -> ActorHandle:
    """Create, but do not start, the actor of an engine. The caller owns it; Ray restarts it if it dies."""
    import ray

    config = Config.model_validate_json(spec.config_json)
    own = next(each for each in config.teachers if each.name == teacher)
    needs = engine_needs(teacher_gpus(own), cuda=spec.cuda)
    options = {"num_gpus": needs.pop("GPU", 0), "num_cpus": needs.pop("CPU"), "max_concurrency": MOST_CALLS}
    return (
        ray.remote(TeacherEngine)
        .options(
            name=teacher_name(teacher, number), namespace=spec.namespace, resources=needs, max_restarts=-1, **options
        )
        .remote(spec, teacher, number)
    )


class TeacherEngine:
    """The actor that `create_teacher` creates; see the module's docstring."""

    def __init__(self, spec: ReplicaSpec, teacher: str, number: int) -> None:
        config = Config.model_validate_json(spec.config_json)
        own = next(each for each in config.teachers if each.name == teacher)
        self.config = engine_config(config, own)
        self.teacher, self.cuda, self._spec = teacher, spec.cuda, spec
        self._engine: AsyncLLM | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._log_file = Path(spec.run_dir) / "logs" / f"{teacher_name(teacher, number)}.log"
        self._log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        redirect_output(self._log_file)
        os.environ.update(engine_environment(self.config.rollout, cuda=spec.cuda, model=self.config.model.path))
        name_shared_memory()
        spec.watch_supervisor()

    async def start(self) -> None:
        """Build the engine and score two tokens. Raises RuntimeError with the engine's reason."""
        await self.score([ScoreRequest([0, 0], 1)])

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """Return the teacher's log-probs of the tokens of each request, in their order.

        Raises RequestFailed if the engine refuses one. If the engine has died, this process ends and Ray restarts it.
        """
        engine = await self._ready()
        try:
            return list(await asyncio.gather(*(self._score(engine, each) for each in requests)))
        except Exception as error:
            if engine.errored:
                logger.exception("the engine of teacher %s has died", self.teacher)
                os._exit(1)
            raise RequestFailed(f"teacher {self.teacher} refused a request: {type(error).__name__}: {error}") from error

    async def shutdown(self) -> None:
        """Stop the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown(timeout=0.5)  # it has nothing to save
            self._engine = None

    async def _ready(self) -> AsyncLLM:
        async with self._starting:
            if self._engine is None:
                try:
                    bound_s = self.config.timeouts.engine_start_s
                    async with starting_alone(f"teacher {self.teacher}", bound_s, cuda=self.cuda):
                        self._engine = self._build()
                except Exception as error:
                    logger.exception("teacher %s failed to start", self.teacher)
                    reason = root_cause(self._log_file, self._log_start) or f"{type(error).__name__}: {error}"
                    raise RuntimeError(f"teacher {self.teacher} failed to start: {reason}") from None
            return self._engine

    def _build(self) -> AsyncLLM:
        # In the event loop's thread, as in `EngineReplica`.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        longest = self._spec.max_model_len
        assert longest is not None  # the supervisor has resolved it
        arguments = engine_args(self.config, cuda=self.cuda, max_model_len=scored_tokens(longest))
        # Log-probs of prompts are not cached, so such requests read no cached prefix.
        arguments["enable_prefix_caching"] = False
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def _score(self, engine: AsyncLLM, request: ScoreRequest) -> Scored:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: RequestOutput | None = None
        name = f"score-{next(self._numbers)}"
        async for output in engine.generate({"prompt_token_ids": request.token_ids}, parameters, request_id=name):
            final = output
        found = None if final is None else final.prompt_logprobs
        if found is None:
            raise RuntimeError(f"the engine gave no log-probs of {len(request.token_ids)} tokens")
        # The first token has no log-prob.
        if list(found.token_ids) != request.token_ids[1:]:  # type: ignore[union-attr]
            raise RuntimeError(f"the engine gave log-probs of other tokens than the {len(request.token_ids)} asked for")
        return [float(value) for value in found.logprobs[request.start - 1 :]]  # type: ignore[union-attr]
