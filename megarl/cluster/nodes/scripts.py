"""The scripts that `megarl launch` submits or runs: what a config asks for, before a script of launch/ takes over."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.nodes.topology import make_topology, stop_seconds
from megarl.config.schema import Config
from megarl.config.schema.job import LaunchConfig


def slurm_script(config: Config, config_file: Path, arguments: Sequence[str] = (), *, cuda: bool = True) -> str:
    """Return the batch script of one config, whose body is launch/slurm/job.sh.

    `arguments`: overrides and options, which come before the script's own. `cuda`: ask for GPUs.
    """
    lines = [
        "#!/usr/bin/env bash",
        *directives(config, cuda=cuda),
        "",
        *config.launch.setup,
        *([] if config.launch.requeue else ["requeue=no"]),
        *([" ".join(["set --", *map(shlex.quote, arguments), '"$@"'])] if arguments else []),
        f"config={shlex.quote(str(config_file))}",
        'source "$SLURM_SUBMIT_DIR/launch/slurm/job.sh"',
    ]
    return "\n".join(lines) + "\n"


def local_script(launch: LaunchConfig, config_file: Path, arguments: Sequence[str] = ()) -> str:
    """Return the script that runs one config on this machine, by launch/local.sh. `arguments`: as for SLURM."""
    command = " ".join(map(shlex.quote, ["launch/local.sh", str(config_file), *arguments]))
    return "\n".join(["#!/usr/bin/env bash", *launch.setup, f"source {command}"]) + "\n"


def directives(config: Config, *, cuda: bool) -> list[str]:
    """Return the #SBATCH lines of a config. `cuda`: ask for GPUs."""
    launch, topology = config.launch, make_topology(config)
    options = [
        f"--job-name={config.run.name}",
        "--ntasks-per-node=1",
        f"--signal=B:USR1@{stop_seconds(launch, config.timeouts)}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        f"--nodes={len(topology.nodes)}",
    ]
    if cuda:
        options.append(f"--gpus-per-node={topology.node_gpus}")
    if launch.node_cpus is None:
        options += ["--exclusive", "--mem=0"]
    else:
        options.append(f"--cpus-per-task={launch.node_cpus}")
    if launch.time_limit is not None:
        options.append(f"--time={launch.time_limit}")
    return [f"#SBATCH {option}" for option in (*options, *launch.sbatch)]
