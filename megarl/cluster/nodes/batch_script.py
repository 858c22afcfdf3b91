"""Launch scripts as text: a pure function of the config. The scripts in launch/ are this module's output.

The body is the same for every config; only the head (what to ask the cluster for, which config) differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.nodes.node_commands import ENTRY, node_command, torchrun_command, torchrun_environment
from megarl.cluster.nodes.topology import STOP_MARGIN_S, NodePlan, Topology, make_topology, stop_seconds
from megarl.cluster.ray_head import TRAINER_SHARE, RayShare, rollout_share
from megarl.config.schema import Config, TimeoutsConfig

CONFIGS = Path("examples/rl/configs")
GENERIC_STOP_S = int(TimeoutsConfig().save_s) + STOP_MARGIN_S

SLURM_BODY = """\
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
: "${PYTHON:=python}"

# Config, plan and allocation are checked before anything starts on any node.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler slurm --signal-s "$signal_s" \\
  --config "$config" "$@")
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# Reaches this script alone: the ranks see the file at their next step boundary, save and exit.
stop() { [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"; }
trap 'stop "the time limit is near (SIGUSR1)"' USR1
trap 'stop SIGTERM' TERM

# One agent per node; it starts the node's share and ends all of it (megarl/cluster/nodes/agent.py).
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \\
  {agent} &
agents=$!
# A trapped signal ends a wait early.
while kill -0 "$agents" 2>/dev/null; do wait "$agents" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
if [ "$status" = preempted ] && [ "$requeue" = yes ]; then
  echo "megarl: queued again as job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
[ "$status" != failed ]
"""

LOCAL_BODY = """\
set -euo pipefail
: "${PYTHON:=python}"

# Config, plan and this machine are checked before anything starts.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler local --config "$config" "$@")
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# The ranks see the file at their next step boundary, save and exit. A second Ctrl-C ends everything at once.
stop() { [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"; }
trap 'stop SIGUSR1' USR1
trap 'stop SIGTERM' TERM
trap 'stop SIGINT' INT

{agent} &
agent=$!
# A trapped signal ends a wait early.
while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
[ "$status" != failed ]
"""

GENERIC_USAGE = """\
config=${1:?usage: USAGE CONFIG [section.key=value ...]}
shift
"""


def slurm_script(config: Config, config_file: Path, overrides: Sequence[str] = (), *, cuda: bool = True) -> str:
    """The batch script of one config. `cuda`: ask for GPUs."""
    topology = make_topology(config)
    head = [
        f"# {config.run.name}, nodes: {len(topology.nodes)}. Made by:",
        f"# megarl launch --config {config_file} --scheduler slurm",
        *_directives(config, topology, cuda),
        "",
        *_node_comments(config, topology, cuda),
        *config.launch.setup,
        f"config={shlex.quote(str(config_file))}",
        f"requeue={'yes' if config.launch.requeue else 'no'}",
        _signal_line(stop_seconds(config)),
        _set_arguments(overrides),
    ]
    return "\n".join(["#!/usr/bin/env bash", *head, _slurm_body()])


def generic_slurm_script() -> str:
    """launch/slurm/train.sbatch: nodes, GPUs and time come from sbatch's own options."""
    head = [
        "#!/usr/bin/env bash",
        "# Any config: sbatch --nodes=N --gpus-per-node=G --time=T launch/slurm/train.sbatch CONFIG [key=value ...]",
        "# `megarl launch --config CONFIG --scheduler slurm` knows N, G and T, and submits. An allocation that does",
        "# not fit the config is refused before anything starts.",
        *_common_directives("megarl", GENERIC_STOP_S),
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "",
        GENERIC_USAGE.replace("USAGE", "sbatch [options] launch/slurm/train.sbatch") + "requeue=${MEGARL_REQUEUE:-yes}",
        _signal_line(GENERIC_STOP_S),
    ]
    return "\n".join([*head, _slurm_body()])


def local_script(config: Config, config_file: Path, overrides: Sequence[str] = (), *, cuda: bool = True) -> str:
    """The script of one config on one machine."""
    topology = make_topology(config)
    head = [
        f"# {config.run.name} on one machine. Made by:",
        f"# megarl launch --config {config_file} --scheduler local",
        *_node_comments(config, topology, cuda),
        *config.launch.setup,
        f"config={shlex.quote(str(config_file))}",
        _set_arguments(overrides),
    ]
    return "\n".join(["#!/usr/bin/env bash", *head, _local_body()])


def generic_local_script() -> str:
    """launch/local.sh."""
    head = [
        "#!/usr/bin/env bash",
        "# Any config on this machine: launch/local.sh CONFIG [section.key=value ...]",
        GENERIC_USAGE.replace("USAGE", "launch/local.sh").rstrip("\n"),
    ]
    return "\n".join([*head, _local_body()])


def shipped_scripts(root: Path) -> dict[Path, str]:
    """Path below the repository's root -> text: the generic scripts, and one batch script for each recipe."""
    from megarl.config.load import load_config

    scripts = {
        Path("launch/slurm/train.sbatch"): generic_slurm_script(),
        Path("launch/local.sh"): generic_local_script(),
    }
    for path in sorted((root / CONFIGS).glob("*.yaml")):
        config = load_config(path)
        # A recipe is a config with launch settings of its own.
        if "launch" in config.model_fields_set:
            scripts[Path(f"launch/slurm/{path.stem}.sbatch")] = slurm_script(config, CONFIGS / path.name)
    return scripts


def _slurm_body() -> str:
    return SLURM_BODY.replace("{agent}", _agent("")).rstrip("\n") + "\n"


def _local_body() -> str:
    return LOCAL_BODY.replace("{agent}", _agent("0")).rstrip("\n") + "\n"


def _agent(index: str) -> str:
    return " ".join(
        f'"{word}"' if word.startswith("$") else word for word in node_command("$PYTHON", "$launch", index) if word
    )


def _set_arguments(overrides: Sequence[str]) -> str:
    """The config's own overrides first: what is given to the script itself comes last and wins."""
    return " ".join(["set --", *map(shlex.quote, overrides), '"$@"'])


def _signal_line(stop_s: int) -> str:
    """A job cannot ask SLURM for its own --signal; one given to sbatch has to be said here too."""
    return f"signal_s=${{MEGARL_SIGNAL_S:-{stop_s}}}"


def _common_directives(name: str, stop_s: int) -> list[str]:
    return [
        f"#SBATCH --job-name={name}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --signal=B:USR1@{stop_s}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
    ]


def _directives(config: Config, topology: Topology, cuda: bool) -> list[str]:
    launch = config.launch
    lines = [*_common_directives(config.run.name, stop_seconds(config)), f"#SBATCH --nodes={len(topology.nodes)}"]
    if cuda:
        lines.append(f"#SBATCH --gpus-per-node={launch.node_gpus or topology.node_gpus}")
    if launch.node_cpus is None:
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    else:
        lines.append(f"#SBATCH --cpus-per-task={launch.node_cpus}")
    if launch.time_limit is not None:
        lines.append(f"#SBATCH --time={launch.time_limit}")
    return lines + [f"#SBATCH {option}" for option in launch.sbatch]


def _node_comments(config: Config, topology: Topology, cuda: bool) -> list[str]:
    """What the agents start, as the agents' own functions say it."""
    lines = []
    for group in _alike(topology):
        first, last = group[0], group[-1]
        name = f"node {first.index}" if len(group) == 1 else f"nodes {first.index}-{last.index}"
        lines.append(f"# {name}: {first.role}")
        lines += [f"#   {part}" for part in _share(config, topology, first, cuda)]
    return lines


def _alike(topology: Topology) -> list[list[NodePlan]]:
    """Neighbours that run the same."""
    groups: list[list[NodePlan]] = []
    for node in topology.nodes:
        if groups and groups[-1][0].role == node.role:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _share(config: Config, topology: Topology, node: NodePlan, cuda: bool) -> list[str]:
    share = rollout_share(config, cuda=cuda) if node.rollout_devices else TRAINER_SHARE
    devices = _visible(node.rollout_devices) if cuda and node.rollout_devices else ""
    what = "Ray head, supervisor, controller, queue" if node.supervisor else "raylet"
    parts = [f"{devices}{what}: {_share_text(share)}" + (f", {node.engines} vLLM engines" if node.engines else "")]
    if node.trainer_rank is not None:
        command = torchrun_command(
            config, topology, node, python="python", launch_id="$ID", endpoint="$FIRST_TRAINER:$FREE_PORT",
            address="$OWN_ADDRESS", entry=ENTRY, config_file="$LAUNCH/config.yaml",
        )  # fmt: skip
        variables = "".join(f"{name}={value} " for name, value in torchrun_environment().items())
        parts.append(
            (_visible(node.trainer_devices) if cuda else "")
            + variables
            + " ".join(command).replace("is_host=true", "is_host=$FIRST")
        )
    return parts


def _visible(devices: Sequence[int]) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))} "


def _share_text(share: RayShare) -> str:
    return f"{share.num_cpus} CPUs, {share.num_gpus} GPUs for Ray"
