"""One run of TRL's GRPOTrainer: `python -m benchmarks.trl_race.grpo SPEC.json RESULT.json`.

A process of its own, with two threads. The result holds the time at the end of each step and its mean reward.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def reward_of(function: str) -> Callable[..., list[float]]:
    """Return megarl's reward function as TRL calls it."""
    from megarl.rewards.registry import resolve
    from megarl.rewards.types import RewardInput

    score = resolve(function)

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [score(RewardInput(prompt="", response=text, answer=wanted)).score for text, wanted in pairs]

    return reward


def train(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Run `spec["steps"]` steps; return `ends` (Unix seconds; the first one is the start) and `rewards`."""
    from unittest import mock

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    with mock.patch("trl.import_utils.is_vllm_available", lambda *args, **kwargs: False):
        from trl import GRPOConfig, GRPOTrainer  # with vLLM, which it does not use here, its import takes much longer

    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows = [json.loads(line) for line in Path(spec["data"]).read_text(encoding="utf-8").splitlines()]
    messages = [[{"role": "user", "content": row["problem"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    data = Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]})
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            ends.append(time.time())

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.time())

    samples, micro_batch = spec["groups"] * spec["samples_per_group"], spec["micro_batch"]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, seed=spec["seed"], max_steps=spec["steps"], use_cpu=True, bf16=False, fp16=False,
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=samples // micro_batch,
            num_generations=spec["samples_per_group"], max_completion_length=spec["max_tokens"],
            temperature=1.0, top_p=1.0, top_k=0, beta=0.0, epsilon=0.2, num_iterations=1,
            # megarl's defaults: advantages scaled by the group, a mean over the tokens of the whole batch.
            scale_rewards="group", loss_type="dapo",
            learning_rate=spec["lr"], lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95,
            adam_epsilon=spec["eps"], weight_decay=0.0, max_grad_norm=1.0,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model, args=config, processing_class=tokenizer, train_dataset=data, callbacks=[Clock()],
            reward_funcs=reward_of(spec["reward"]),
        )  # fmt: skip
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "ends": ends,
        "rewards": [entry["reward"] for entry in logged],
        "lengths": [entry["completions/mean_length"] for entry in logged],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))
