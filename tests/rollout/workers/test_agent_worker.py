"""The actor of an agent worker, in this process: with a real tokenizer, a real tool and real reward processes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.config.loading.load import config_from_tree
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.workers import agent_worker
from megarl.rollout.workers.agent_worker import AgentWorker, WorkerSpec
from megarl.rollout.workers.worker_pool import WorkerPool
from megarl.telemetry.trace import events
from megarl.telemetry.trace.files import read_events
from tests.support.engines.fake_replicas import Method
from tests.support.models.chat_templates import CHATML_TOOLS
from tests.support.runs.run import tiny_config

REAL_TIME = True  # it waits for reward processes


@dataclass
class CallsThenAnswers:
    """Engines whose first turn calls the calculator, and whose second one answers."""

    tokenizer: Any
    stop: int
    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, *args: Any, **options: Any) -> GenerateResult:
        self.asked.append(request)
        first = request.request_id.endswith("-0")
        text = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>' if first else "42"
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop]
        spans = (VersionSpan(0, 0, len(ids)),)
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), spans, "stop", 0, 0.1)


def test_a_worker_runs_tool_agents_and_judges_them_with_its_share_of_the_reward_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tiny_config(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHATML_TOOLS.replace("{{ tools | tojson }}", "{{ tools[0]['function']['name'] }}")
    tokenizer.save_pretrained(tmp_path / "model")
    tree |= {
        "agent": {"loop": "tool_agent", "tool_format": "hermes"},
        "tools": [{"kind": "examples.rl.tools.calculator:Calculator", "in_worker": True}],
        "sampling": {"max_tokens": 256},
        "reward": {**tree["reward"], "workers": 5},
    }
    tree["rollout"] |= {"agent_workers": 1, "max_model_len": 500}
    tree["trainer"]["micro_batch_tokens"] = 1024
    config = config_from_tree(tree)
    monkeypatch.setattr(agent_worker, "redirect_output", lambda path: None)
    monkeypatch.setattr(agent_worker, "collect_for_loops", lambda *, shipped: None)
    monkeypatch.setattr(agent_worker, "exempt_present_objects", lambda: None)
    pool = ReplicaSpec(config.model_dump_json(), str(tmp_path), "run", cuda=False, max_model_len=64, supervisor=None)

    async def scenario() -> None:
        source = await asyncio.to_thread(PromptSource, config)
        engines = CallsThenAnswers(source.tokenizer, source.stop_token_ids[0])
        worker = AgentWorker(WorkerSpec(pool, 0))
        await worker.start()
        boxes = (*worker._texts().training.values(), *source.toolboxes.values())
        assert [box.max_model_len for box in boxes] == [500, 500], "which ends a loop's trajectory, in either process"
        assert worker._rewards.workers == 2, "half of five: the controller has a share too"

        async def start(index: int) -> Any:
            names: Sequence[str] = ("give", "take", "drop", "shutdown")
            return SimpleNamespace(**{name: Method(getattr(worker, name)) for name in names})

        unused = lambda actor: None  # noqa: E731
        workers = WorkerPool(1, config.timeouts, start=start, end=unused, notify=unused)
        await workers.start()
        groups = RunningGroups(config, source, engines.generate, "run.0", in_workers=True)
        rows = await groups.run(3, None, workers.run_group)
        samples = config.batch.samples_per_group
        assert len(rows) == samples and {row.status for row in rows} == {"ok"}
        assert len(engines.asked) == 2 * samples and groups.stats.tool_calls == samples
        for row in rows:
            inserted = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if not mask]
            assert "42" in source.tokenizer.decode(inserted)
            assert row.reward == 1.0, "the share of digits in the last turn alone"
        await workers.close()
        await source.close_tools()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 600))
    finally:
        events.close_events()
    recorded = list(read_events(tmp_path, {"turn", "tool", "reward"}))
    assert {each.process for each in recorded} == {"worker-0"}, "the worker's start has opened its own files"
    samples = config.batch.samples_per_group
    named = [(each.name, each.group, each.sample) for each in recorded]
    assert sorted(named) == sorted(
        (name, 3, sample) for name in ("turn", "turn", "tool", "reward") for sample in range(samples)
    )
