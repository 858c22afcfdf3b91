"""The scripts of a job, and the arguments and environment of the processes that a node runs. Pure.

`megarl launch --dry-run` shows them. A script has the config's settings and calls one of launch/.
"""

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megarl.cluster.nodes.topology import NodePlan, Topology, make_topology, stop_seconds
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
from megarl.config.schema import Config
from megarl.config.schema.job import LaunchConfig, TimeoutsConfig

ENTRY = "examples/rl/train_rl.py"

# Variables passed to hosts over ssh, in addition to those that the config names.
_PASSED_NAMES = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "WANDB_API_KEY"}
_PASSED_PREFIXES = ("MEGARL_", "NCCL_", "GLOO_", "OMP_", "RAY_", "VLLM_", "MLFLOW_")


def torchrun_command(
    launch: LaunchConfig, timeouts: TimeoutsConfig, topology: Topology, node: NodePlan, *, launch_id: str,
    endpoint: str, address: str, entry: str, config_file: str,
) -> list[str]:  # fmt: skip
    """Return the torchrun command of one trainer node.

    `endpoint`: HOST:PORT of the rendezvous, whose store the first trainer node runs. It is a dynamic rendezvous like
    c10d's: the static one cannot restart the ranks of all nodes after a failure.
    """
    first = node.trainer_rank == 0
    return [
        sys.executable, "-m", "megarl.cluster.torchrun.run",
        "--nnodes", str(topology.trainer_nodes),
        "--nproc-per-node", str(topology.ranks_per_node),
        "--rdzv-id", launch_id,
        "--rdzv-backend", "megarl",
        "--rdzv-endpoint", endpoint,
        # By default torchrun compares host names to find the node with the store.
        "--rdzv-conf", f"is_host={'true' if first else 'false'},join_timeout={int(timeouts.node_s)}",
        "--local-addr", address,
        "--log-dir", os.devnull,  # by default torchrun leaves a temporary directory at each start
        "--max-restarts", str(launch.max_restarts),
        # After a SIGTERM the ranks need this time to end their step and save.
        "--shutdown-timeout", str(stop_seconds(launch, timeouts)),
        entry, "--config", config_file,
    ]  # fmt: skip


def torchrun_environment(run_dir: Path) -> dict[str, str]:
    """Return torchrun's variables: the ranks' store is new at each start, and agents sign with the run's secret.

    `megarl.run.ranks.control_group.join_peers` and `megarl.cluster.torchrun.rendezvous` read them.
    """
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", RUN_DIR_VARIABLE: str(run_dir)}


def raylet_command(launch: str, index: int, agent_pid: int) -> list[str]:
    """Return the command of a raylet that joins the run's Ray cluster and dies with the agent."""
    return [sys.executable, "-m", "megarl.cluster.nodes.raylet", launch, str(index), str(agent_pid)]


def exports(referenced: Collection[str], environment: Mapping[str, str]) -> str:
    """Return shell commands that set on another host what an agent needs from this environment.

    These are the variables of the libraries and those `referenced` by the config (`referenced_variables`).
    """
    names = {*_PASSED_NAMES, *referenced}
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in environment.items()
        if name in names or (name.startswith(_PASSED_PREFIXES) and name.isidentifier())
    )


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
    if not any(option.startswith("--cpus-per-task") for option in launch.sbatch):
        options += ["--exclusive", "--mem=0"]
    if launch.time_limit is not None:
        options.append(f"--time={launch.time_limit}")
    return [f"#SBATCH {_quoted(option)}" for option in (*options, *launch.sbatch)]


def _quoted(option: str) -> str:
    """Return an option as sbatch reads it from a script: a value with white space in quotes."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and any(letter.isspace() for letter in value) else option
