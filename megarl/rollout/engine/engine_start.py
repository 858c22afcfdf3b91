"""Lets vLLM's engine process collect garbage rarely until it has imported what it needs, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.common.process.memory_tuning import begin_start, end_start


class EngineStart:
    """Stands for `EngineCoreProc.run_engine_core` (vllm 0.32.0), which it calls in the engine's process.

    multiprocessing pickles it before its arguments; unpickling these imports vLLM in the new process.
    """

    def __init__(self, original: Callable[..., object]) -> None:
        """`original`: vLLM's function."""
        self._original = original

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Run the engine of this process with vLLM's own arguments."""
        end_start()
        self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], EngineStart], tuple[()]]:
        return _in_new_process, ()


def _in_new_process() -> EngineStart:
    begin_start()
    from vllm.v1.engine.core import EngineCoreProc

    return EngineStart(EngineCoreProc.run_engine_core)


def start_engines_fast() -> None:
    """Let the engine processes that this process will start begin with an `EngineStart`. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    core: Any = EngineCoreProc
    if not isinstance(core.run_engine_core, EngineStart):
        core.run_engine_core = EngineStart(core.run_engine_core)
