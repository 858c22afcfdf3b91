"""Single turns in a pool whose steps take their groups as if engines slept while the trainer works.

Importing this replaces the pace of the admission in the controller's process: which groups a step takes then depends on
no time, and a run with GPUs for each side can be compared with one that shares them.
"""

from dataclasses import replace

from megarl.config.derived.staleness import Pace
from megarl.config.schema import Config
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.orchestrator import prompt_groups

_pace_of = prompt_groups.pace_of


def _in_turns(config: Config) -> Pace:
    return replace(_pace_of(config), in_turns=True)


prompt_groups.pace_of = _in_turns


class InTurns(SingleTurn):
    """The loop that config names, so that the controller imports this module."""
