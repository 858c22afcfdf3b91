"""Why an engine has failed: the innermost cause of its exception, its log, and how its processes ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.process.child_process import ending_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def innermost(error: BaseException) -> str:
    """Return the innermost cause in one line: vLLM wraps the engine's error in several layers."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"


def root_cause(log_file: Path, start: int = 0) -> str:
    """Return the last error that vLLM's engine or worker process logged after byte `start`; "" if there is none.

    The front end's error only refers to that log. The lines look like
    `(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1510] ValueError: ...`.
    """
    logged = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ERROR \S+ \S+ \[[^\]]*\] ([\w.]*(?:Error|Exception)\b.*)$")
    with log_file.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    found = [match[1] for line in lines if (match := logged.match(line))]
    return found[-1] if found else ""


def ending(engine: AsyncLLM | None) -> str:
    """Return how the engine's processes ended, such as ` (killed by SIGKILL)`; "" if vLLM does not know it."""
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    codes = [] if manager is None else manager.finished_procs().values()
    return f" ({', '.join(sorted({ending_of(code) for code in codes}))})" if codes else ""
