"""`megarl eval`: evaluate a Hugging Face checkpoint on held-out files, with the pool and code of a training run.

It starts a pool without a trainer: supervisor, engines with the checkpoint's own weights, controller, reward processes.
Then it requests the evaluation that a run makes before its first step, and tears the pool down.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli import standalone
from megarl.common.errors import ConfigError
from megarl.config.derived.datasets import held_out_sets

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.evaluation.harness import SetReport

LABEL = "standalone"
NO_LIMIT = 1 << 40  # larger than any batch: without a trainer its limits must not refuse an evaluation
DEFAULT_MAX_TOKENS = 1024
# The options that set these keys.
_SET_BY_OPTION = {
    "model.path": "--model",
    "reward.function": "--reward",
    "data.system_prompt": "--system-prompt",
    "data.suffix": "--suffix",
    "evaluation.sampling.samples": "--samples",
    "evaluation.sampling.temperature": "--temperature",
    "evaluation.sampling.top_p": "--top-p",
    "evaluation.sampling.top_k": "--top-k",
    "rollout.max_model_len": "--max-model-len",
    "rollout.tensor_parallel": "--tensor-parallel",
    "rollout.replicas": "--replicas",
    "run.seed": "--seed",
}
# For error messages; with further keys.
OPTION_OF = {
    **_SET_BY_OPTION,
    "data.path": "--data",
    "data.limit": "--limit",
    "sampling.max_tokens": "--max-tokens",
    "evaluation.max_tokens": "--max-tokens",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `eval` to the `megarl` command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a checkpoint: mean@k, pass@k, maj@k with confidence intervals",
        description="Evaluate a Hugging Face checkpoint, greedy and sampled, on the rollout pool of a training run: "
        "mean@k, unbiased pass@k, maj@k with 95% confidence intervals, lengths, truncated share. All responses are "
        "kept in the run directory.",
        epilog="example: megarl eval --model runs/quickstart/hf --data heldout.jsonl --samples 4 --json report.json",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face directory")
    add("--data", required=True, action="append", metavar="FILE", help="JSONL or Parquet; may be given several times")
    add(
        "--reward",
        default="math",
        metavar="NAME",
        help="gsm8k, math, code or module:function (default: %(default)s)",
    )
    add("--samples", type=int, default=4, metavar="K", help="sampled responses per problem (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="temperature of the sampled responses (default: %(default)s)",
    )
    add("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: %(default)s)")
    add("--top-k", type=int, default=-1, metavar="K", help="top-k sampling; -1 = off (default: %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"response tokens at most (default: {DEFAULT_MAX_TOKENS}, or half the model's positions)",
    )
    add("--max-model-len", type=int, metavar="N", help="prompt + response tokens (default: the model's positions)")
    add("--limit", type=int, metavar="N", help="only the first N problems of each file")
    add("--system-prompt", metavar="TEXT", help="prepended as a system message")
    add("--suffix", default="", metavar="TEXT", help="appended to every problem, e.g. an answer-format instruction")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="default: that of the checkpoint")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs per engine (default: %(default)s)")
    add("--replicas", type=int, default=1, metavar="N", help="number of engines (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: %(default)s)")
    add("--run-dir", type=Path, metavar="DIR", help="logs and responses (default: runs/eval-TIME)")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("overrides", nargs="*", metavar="section.key=value", help="anything else, e.g. reward.timeout_s=30")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate and report; return the exit status.

    It is 0 on success, 1 (with one message) if the pool or every response of a set failed, 130 after Ctrl-C or SIGTERM.
    Raises ConfigError for a mistake in options, model or data, or if another run holds the run directory.
    """
    config = eval_config(options)
    _check(config)
    from megarl.common.errors import RolloutError

    with standalone.holding(config.run_dir, config.timeouts.node_s, "megarl eval"):
        try:
            with standalone.interrupted_once(standalone.ANY_STOP):
                reports = _evaluate(config)
        except (RolloutError, ValueError, TimeoutError) as error:
            standalone.say(str(error))
            return 1
        except KeyboardInterrupt:
            standalone.say("interrupted; the engines were shut down")
            return 130
        _show(reports, responses_file(config.run_dir))
        if options.json is not None:
            from megarl.common.files import write_json

            write_json(options.json, report_content(reports, config))
    if failed := [report.nothing_judged for report in reports if report.nothing_judged is not None]:
        standalone.say("; ".join(failed))
        return 1
    return 0


def eval_config(options: argparse.Namespace) -> Config:
    """Return the config of a run without a trainer, for this evaluation. Raises ConfigError naming wrong options."""
    from megarl.config.loading.load import apply_overrides, config_from_tree

    names, model_config = _names(options.data), standalone.model_config_of(Path(options.model))
    tree: dict[str, Any] = {
        "run": {"name": "eval", "dir": str(standalone.run_dir_of(options, "eval")), "steps": 1},
        "trainer": {
            "precision": standalone.precision_of(options.dtype, model_config),
            "micro_batch_tokens": NO_LIMIT,
        },
        "batch": {"groups": 1, "samples_per_group": 2},
        "sampling": {"max_tokens": _max_tokens(options.max_tokens, options.max_model_len, model_config)},
        # Problems beyond --limit may be too long; a problem that is evaluated may not.
        "data": {"path": options.data[0], "overlong_prompts": "skip"},
        "reward": {"workers": os.cpu_count() or 1},
        "evaluation": {
            "sets": [
                {"name": name, "path": path, "limit": options.limit}
                for name, path in zip(names, options.data, strict=True)
            ],
        },
        # Without a trainer the pool may use every GPU, and engines must load the weights.
        "rollout": {
            "nodes": "separate",
            "load_weights": True,
        },
    }
    given = [*standalone.overrides_of(options, _SET_BY_OPTION), *options.overrides]
    try:
        return config_from_tree(apply_overrides(tree, given))
    except ConfigError as error:
        raise _by_option(error) from None


def report_content(reports: Sequence[SetReport], config: Config) -> dict[str, Any]:
    """Return what `--json` writes: the figures of every set with intervals, and how it was sampled and scored."""
    conditions = {
        each.name: {
            "reward": each.reward.function, "max_tokens": each.max_tokens, "sampling": each.sampling.model_dump(),
        }
        for each in held_out_sets(config)
    }  # fmt: skip
    return {
        "model": str(config.model.path),
        "seed": config.run.seed,
        "responses": str(responses_file(config.run_dir)),
        "sets": [{**report.to_dict(), **conditions[report.name]} for report in reports],
    }


def responses_file(run_dir: Path) -> Path:
    """Return the file to which the controller writes every response of the evaluation."""
    return run_dir / f"eval_{LABEL}.jsonl"


def _evaluate(config: Config) -> list[SetReport]:
    """Start a pool, evaluate and tear it down. Raises RolloutError naming what failed."""
    from megarl.cluster.client.pool_client import PoolClient
    from megarl.cluster.pool.pool_process import launch_supervisor, stop_supervisor
    from megarl.common.errors import RolloutError
    from megarl.common.rundir.notices import NoticeWatch
    from megarl.config.checks.sections import detect_device
    from megarl.rollout.orchestrator.step_batches import PublicationNeeded

    standalone.say(f"starting the engine for {config.model.path}; logs in {config.run_dir / 'logs'}")
    with closing(NoticeWatch(config.run_dir, standalone.say)):
        handle = launch_supervisor(
            config.model_dump_json(), config.run_dir, os.getpid(), cuda=detect_device() == "cuda"
        )
        client = None
        try:
            client = PoolClient.connect(handle, config)
            standalone.say("evaluating")
            reports = client.evaluate(0, LABEL)
            if isinstance(reports, PublicationNeeded):  # the controller returns this only to a trainer
                raise RolloutError(reports.reason)
            return reports
        finally:
            if client is not None:
                client.close()
            else:
                stop_supervisor(Path(handle.run_dir), handle.process, handle.launch_id, config.timeouts.shutdown_s)


def _check(config: Config) -> None:
    """Check model, tokenizer and data before any process starts. Raises ConfigError naming what is wrong."""
    from megarl.config.checks.sections import check

    standalone.refuse_unreadable(config.model.path)
    try:
        check(config)
    except ConfigError as error:
        raise _by_option(error) from None
    from megarl.rollout.tasks.prompts import PromptSource

    try:
        PromptSource(config).eval_sets()
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def _show(reports: Sequence[SetReport], responses: Path) -> None:
    from rich.console import Console

    from megarl.evaluation.table import report_table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    console.print(report_table([each for report in reports for each in (report.greedy, report.sampled)]))
    sys.stdout.write(f"responses: {responses}\n")


def _names(paths: Sequence[str]) -> list[str]:
    """Return one name per file: its stem, with its folder or a number where stems repeat."""
    names: list[str] = []
    for path in map(Path, paths):
        candidates = [path.stem, f"{path.parent.name}-{path.stem}", *(f"{path.stem}-{i}" for i in range(2, 1000))]
        names.append(next(name for name in candidates if name not in names))
    return names


def _max_tokens(wanted: int | None, max_model_len: int | None, model_config: dict[str, Any]) -> int:
    """Return the most response tokens: `wanted`, else DEFAULT_MAX_TOKENS or half the model's length if that is less."""
    if wanted is not None:
        return wanted
    room = max_model_len or model_config.get("max_position_embeddings")
    return min(DEFAULT_MAX_TOKENS, max(1, room // 2)) if isinstance(room, int) else DEFAULT_MAX_TOKENS


def _by_option(error: ConfigError) -> ConfigError:
    """Return the same problems, each key replaced by the option that sets it."""
    problems = []
    for problem in error.problems:
        key, _, text = problem.partition(": ")
        option = OPTION_OF.get(re.sub(r"^evaluation\.sets\.\d+", "data", key))
        text = f"{option}: {text}" if option else problem
        if text not in problems:
            problems.append(text)
    return ConfigError(problems)
