"""Finds the modules of docs/reference/api.md, and those that a config can name, under their names in 0.1.0."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Until the next release.
MOVED = {
    "megarl.algorithms.group_rewards": "megarl.algorithms.interface.group_rewards",
    "megarl.algorithms.token_loss": "megarl.algorithms.interface.token_loss",
    "megarl.cluster.nodes.rendezvous_entry": "megarl.cluster.torchrun.entry",
    "megarl.commands.cli": "megarl.cli.main",
    "megarl.config.load": "megarl.config.loading.load",
    "megarl.data.dialogue": "megarl.chat.dialogue",
    "megarl.data.tokenize": "megarl.chat.tokenize",
    "megarl.rewards.code": "megarl.rewards.builtin.code",
    "megarl.rewards.gsm8k": "megarl.rewards.builtin.gsm8k",
    "megarl.rewards.math": "megarl.rewards.builtin.math",
    "megarl.rollout.agents.demonstrate": "megarl.rollout.agents.loop_host",
    "megarl.rollout.agents.finish": "megarl.rollout.agents.tool_agent",
    "megarl.rollout.agents.single_turn": "megarl.rollout.agents.loop_host",
    "megarl.rollout.requests": "megarl.rollout.engine.messages",
    "megarl.telemetry.event_files": "megarl.telemetry.trace.files",
    "megarl.weights.vllm_plugin": "megarl.weights.receive.vllm_plugin",
}


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = any(name.startswith(f"{fullname}.") for name in MOVED)
        return ModuleSpec(fullname, self, is_package=package) if package or fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        if (new := MOVED.get(module.__name__)) is not None:
            warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
            sys.modules[module.__name__] = importlib.import_module(new)


def find_moved_modules() -> None:
    """Let `import` find the old names, after all modules that exist under the name that it looks for."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
