"""`megarl serve`: a pool of engines behind one URL, for harnesses that are not part of megarl.

It starts the pool of a training run without trainer, queue and rewards: supervisor, engines with the checkpoint's own
weights, a controller, and the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli import standalone
from megarl.common.errors import ConfigError

if TYPE_CHECKING:
    from megarl.cluster.pool.pool_process import SupervisorHandle
    from megarl.config.schema import Config

# The options that set these keys.
SET_BY_OPTION = {
    "model.path": "--model",
    "rollout.replicas": "--replicas",
    "rollout.tensor_parallel": "--tensor-parallel",
    "rollout.max_model_len": "--max-model-len",
    "gateway.host": "--host",
    "gateway.port": "--port",
}
LOOK_S = 0.5  # between two checks of the pool


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the `megarl` command."""
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint by HTTP: token ids in and out, and OpenAI's chat completions",
        description="Serve a Hugging Face checkpoint on the rollout pool of a training run: /inference/v1/generate "
        "with token ids, /v1/chat/completions, and sessions that keep every sampled token. Prints the URL and a curl "
        "line when the engines are up; Ctrl-C ends everything.",
        epilog="example: megarl serve --model runs/quickstart/hf --port 8000",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face directory")
    add("--config", type=Path, metavar="FILE", help="take engines, gateway and time-outs from this config of a run")
    add("--replicas", type=int, metavar="N", help="number of engines (default: 1, or that of --config)")
    add("--tensor-parallel", type=int, metavar="N", help="GPUs per engine (default: 1, or that of --config)")
    add("--max-model-len", type=int, metavar="N", help="prompt + response tokens (default: the model's positions)")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="default: that of the checkpoint")
    add("--host", metavar="ADDRESS", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=int, metavar="P", help="port (default: a free one)")
    add(
        "--token-file", type=Path, metavar="FILE",
        help="file of mode 0600 with the token that clients must send (default: a new one in the run directory)",
    )  # fmt: skip
    add("--run-dir", type=Path, metavar="DIR", help="logs, gateway.json and the token (default: runs/serve-TIME)")
    add("--dry-run", action="store_true", help="check everything, show what would be served, start nothing")
    add("overrides", nargs="*", metavar="section.key=value", help="anything else, e.g. rollout.max_num_seqs=64")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted; return the exit status.

    It is 0 after Ctrl-C or SIGTERM, and 1 (with one message) if the pool failed. Raises ConfigError for a mistake in
    options, config, model or token file, or if another run holds the run directory.
    """
    config = serve_config(options)
    max_model_len = _check(config, options.token_file)
    if options.dry_run:
        rollout, gateway = config.rollout, config.gateway
        sys.stdout.write(
            f"model        {config.model.path} ({config.trainer.precision})\n"
            f"engines      {rollout.replicas} x {rollout.tensor_parallel} GPU (or one core each without GPUs), "
            f"{max_model_len} tokens of prompt and response\n"
            f"gateway      {gateway.host or '127.0.0.1'}:{gateway.port or 'a free port'}\n"
            f"directory    {config.run_dir}\nnothing was started (--dry-run)\n"
        )
        return 0
    with standalone.holding(config.run_dir, config.timeouts.node_s, "megarl serve"):
        return _serve(config, options.token_file)


def serve_config(options: argparse.Namespace) -> Config:
    """Return the config of a pool that only serves. Raises ConfigError naming what is wrong."""
    from megarl.config.loading.load import load_config

    # Without a trainer the pool may use every GPU, and engines must load the weights.
    fixed = ["gateway.enabled=true", "rollout.nodes=separate", "rollout.load_weights=true", "run.deterministic=false"]
    fixed.append("rollout.share_gpus=false")
    run_dir = json.dumps(str(standalone.run_dir_of(options, "serve")))
    given = [*standalone.overrides_of(options, SET_BY_OPTION), f"run.dir={run_dir}", *fixed]
    if options.config is not None:
        return load_config(options.config, [*options.overrides, *given])
    return _plain_config([*given, *options.overrides], options)


def _plain_config(overrides: list[str], options: argparse.Namespace) -> Config:
    """Return the config without a file; values that only a trainer needs have no effect."""
    from megarl.config.loading.load import apply_overrides, config_from_tree

    precision = standalone.precision_of(options.dtype, standalone.model_config_of(Path(options.model)))
    tree: dict[str, Any] = {
        "run": {"name": "serve", "steps": 1},
        "model": {"path": options.model},
        "trainer": {"precision": precision},
        "batch": {"groups": 1, "samples_per_group": 2},
        "sampling": {"max_tokens": 1},
        "data": {},
    }
    return config_from_tree(apply_overrides(tree, overrides))


def _check(config: Config, token_file: Path | None) -> int:
    """Check model, config and token file before any process starts; return the most prompt and response tokens.

    Raises ConfigError.
    """
    from megarl.chat.tokenize import load_tokenizer, stop_token_ids
    from megarl.config.checks.sections import max_sequence_tokens, serving_problems
    from megarl.gateway.token_file import read_token
    from megarl.models.hf.read_config import load_info

    standalone.refuse_unreadable(config.model.path)
    problems = list(serving_problems(config))
    try:
        info = load_info(config.model.path)
        stop_token_ids(config.model.path, load_tokenizer(config.model.path), config.sampling.stop_token_ids)
    except ValueError as error:
        raise ConfigError([*problems, f"--model: {error}"]) from None
    if token_file is not None:
        try:
            read_token(token_file)
        except (OSError, ValueError) as error:
            problems.append(f"--token-file: {error}")
    length = max_sequence_tokens(config, info)
    if length > info.max_positions:
        problems.append(f"--max-model-len: {length} is more than the model's {info.max_positions} positions; lower it")
    if problems:
        raise ConfigError(problems)
    return length


def _serve(config: Config, token_file: Path | None) -> int:
    """Start the pool, print its URL, wait for its end or an interrupt, and tear it down; return the exit status."""
    from megarl.cluster.pool.pool_process import launch_supervisor, stop_supervisor, wait_ready
    from megarl.common.errors import RolloutError
    from megarl.common.rundir.notices import NoticeWatch
    from megarl.config.checks.sections import detect_device

    handle: SupervisorHandle | None = None
    engines = config.rollout.replicas
    with standalone.interrupted_once(standalone.ANY_STOP) as ignore_signals:
        try:
            with closing(NoticeWatch(config.run_dir, standalone.say)):
                standalone.say(
                    f"starting {engines} engine{'s' * (engines != 1)} for {config.model.path}; logs in "
                    f"{config.run_dir}/logs"
                )
                handle = launch_supervisor(
                    config.model_dump_json(), config.run_dir, os.getpid(), cuda=detect_device() == "cuda", serves=True,
                    gateway_token_file=None if token_file is None else str(token_file.resolve()),
                )  # fmt: skip
                handle = wait_ready(handle, config.timeouts.engine_start_s)
                sys.stdout.write(_welcome(config.run_dir, config.model.path))
                sys.stdout.flush()
                while True:
                    handle.check()
                    time.sleep(LOOK_S)
        except KeyboardInterrupt:
            standalone.say("shutting down the engines")
            return 0
        except (RolloutError, ValueError) as error:
            standalone.say(str(error))
            return 1
        finally:
            ignore_signals()  # the tear-down has a bound, and must not be interrupted
            if handle is not None:
                stop_supervisor(Path(handle.run_dir), handle.process, handle.launch_id, config.timeouts.shutdown_s)


def _welcome(run_dir: Path, model: Path) -> str:
    """Return the URL, the token file and a curl line for the user."""
    from megarl.gateway.actor import model_names
    from megarl.gateway.token_file import read_gateway_file

    gateway, name = read_gateway_file(run_dir), model_names(model)[0]
    asked = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"url          {gateway['url']}\n"
        f"token file   {gateway['token_file']}\n"
        f'curl {gateway["base_url"]}/chat/completions -H "Authorization: Bearer $(cat {gateway["token_file"]})" '
        f"-H 'Content-Type: application/json' -d '{asked}'\n"
    )
