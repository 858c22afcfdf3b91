"""The start of an engine process: how it collects garbage while it imports vLLM, and afterwards."""

import gc
import json
import multiprocessing
import sys
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCoreProc

from megarl.rollout.engine.engine_args import EngineStart, start_engines_fast


class Arguments:
    """Stands for vLLM's config: notes how its process collects when it is unpickled, and when the engine begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self.note("unpickled", "vllm.v1.engine.core" in sys.modules)

    @property
    def logging_config(self) -> None:
        """End the process; `run_engine_core` reads this first."""
        self.note("began", gc.get_freeze_count() > 100_000)
        raise SystemExit(0)

    def note(self, when: str, found: bool) -> None:
        self.path.with_suffix(f".{when}").write_text(json.dumps([*gc.get_threshold(), found]))


@pytest.mark.slow
def test_an_engine_process_collects_rarely_until_it_has_imported_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCoreProc, "run_engine_core", staticmethod(EngineCoreProc.run_engine_core))
    for _ in range(2):
        start_engines_fast()
    start = EngineCoreProc.run_engine_core
    assert isinstance(start, EngineStart) and not isinstance(start._original, EngineStart)
    path = tmp_path / "thresholds"
    process = multiprocessing.get_context("spawn").Process(target=start, kwargs={"vllm_config": Arguments(path)})
    process.start()
    process.join(120)
    assert process.exitcode == 0
    found = {when: json.loads(path.with_suffix(f".{when}").read_text()) for when in ("unpickled", "began")}
    assert found["unpickled"] == [50_000, 10, 10, True], "the imports of the arguments come after this"
    assert found["began"] == [700, 10, 10, True], "as Python collects by itself, without what was imported"
