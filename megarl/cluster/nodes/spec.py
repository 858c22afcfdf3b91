"""The launch file: the resolved config and places of one launch of a run, the same file for every node."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.cluster.nodes.topology import Topology, make_topology
from megarl.config.schema import Config

LAUNCH_FILE = "launch.json"


@dataclass(frozen=True)
class LaunchSpec:
    """The content of a launch file. `hosts` are the names or addresses of the nodes by index.

    `directory` is RUN_DIR/launch/ID, `entry` the script that torchrun runs. `steps_before`: the training steps that
    the previous launch had saved when it was stopped; 0 for a first launch.
    """

    launch_id: str
    config_json: str
    directory: str
    cwd: str
    cuda: bool
    hosts: tuple[str, ...]
    entry: str
    steps_before: int

    @cached_property
    def config(self) -> Config:
        """The validated config of the job, with all overrides in it."""
        return Config.model_validate_json(self.config_json)

    @cached_property
    def topology(self) -> Topology:
        """The nodes' roles and devices, as the config implies them."""
        return make_topology(self.config)

    @property
    def run_dir(self) -> Path:
        """RUN_DIR, two levels above RUN_DIR/launch/ID."""
        return Path(self.directory).parents[1]

    @property
    def path(self) -> Path:
        """The launch file, in `directory`."""
        return Path(self.directory) / LAUNCH_FILE

    def save(self) -> None:
        """Write the launch file. Its directory must exist."""
        self.path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> LaunchSpec:
        """Read a launch file. Raises FileNotFoundError if there is none."""
        content: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**content, "hosts": tuple(content["hosts"])})


def launch_directory(run_dir: Path, launch_id: str) -> Path:
    """Return RUN_DIR/launch/ID, absolute."""
    return run_dir.resolve() / "launch" / launch_id
