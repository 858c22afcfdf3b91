"""A real vLLM engine as a teacher: its log-probs are those of transformers, token by token, and it refuses nonsense."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.common.errors import RequestFailed
from megarl.config.derived.teachers import engine_config
from megarl.rollout.engine.engine_args import engine_environment
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.teachers.scores import ScoreRequest
from megarl.rollout.engine.teachers.teacher_engine import TeacherEngine
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import config as config_of

LONGEST = 48


def unstarted(model: Path, run_dir: Path) -> TeacherEngine:
    """A teacher without an actor's process, whose output would be redirected."""
    config = config_of(model, teachers=[{"name": "big", "path": model}], data__teacher="big")
    made = object.__new__(TeacherEngine)
    made.config, made.teacher, made.cuda = engine_config(config, config.teachers[0]), "big", False
    made._spec = ReplicaSpec("", str(run_dir), "ns", False, LONGEST, None)
    made._engine, made._starting, made._numbers = None, asyncio.Lock(), itertools.count()
    made._log_file, made._log_start = run_dir / "log", 0
    return made


@pytest.mark.engine
def test_its_log_probs_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 9), (1, 1), (20, LONGEST - 20), (7, 2)]
    requests = []
    for prompt, response in sizes:
        ids = torch.randint(1, 90, (prompt + response,), generator=generator).tolist()
        requests.append(ScoreRequest(ids, prompt))

    async def scored() -> tuple[list[Any], BaseException | None]:
        teacher = unstarted(model, tmp_path)
        for name, value in engine_environment(teacher.config.rollout, cuda=False).items():
            monkeypatch.setenv(name, value)
        try:
            await teacher.start()
            found = await teacher.score(requests)
            again = await teacher.score(requests[:1])
            assert again[0] == pytest.approx(found[0], abs=1e-5)
            try:
                await teacher.score([ScoreRequest([1] * (LONGEST + 5), 1)])
            except RequestFailed as error:
                return found, error
            return found, None
        finally:
            await teacher.shutdown()

    found, refusal = asyncio.run(scored())
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for request, answer in zip(requests, found, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([request.token_ids])).logits[0].float()
        log_p = torch.log_softmax(logits, -1)[request.start - 1 : -1]
        targets = torch.tensor(request.token_ids[request.start :])
        wanted_R = log_p.gather(1, targets[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(answer), wanted_R, atol=2e-5, rtol=0)
    assert refusal is not None and "teacher big refused a request" in str(refusal)
