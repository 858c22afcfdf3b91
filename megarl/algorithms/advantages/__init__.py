"""Advantages, one per file with its options and its paper. Importing this package registers them in `ADVANTAGES`."""

from megarl.algorithms.advantages import dr_grpo, grpo, mt_grpo, reinforce_pp, rloo
from megarl.algorithms.interface.group_rewards import ADVANTAGES

__all__ = ["ADVANTAGES", "dr_grpo", "grpo", "mt_grpo", "reinforce_pp", "rloo"]
