"""Dr. GRPO's advantage (arXiv:2503.20783): dividing by std favours prompts that are too easy or too hard."""

from __future__ import annotations

from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards, centred


@ADVANTAGES.register("dr_grpo", title="r - mean of the group", paper="arXiv:2503.20783")
def dr_grpo(batch: GroupRewards) -> Advantages:
    """Return r - mean of the group."""
    return [centred(group) for group in batch.rewards]
