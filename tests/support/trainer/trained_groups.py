"""The counts of a step that trains its plan, without a policy that trains it."""

from megarl.run.step.plan import StepPlan, check_trained


def planned_keys(plan: StepPlan) -> list[str]:
    """The keys of the samples of all replicas in all mini-batches."""
    return [key for mini_batch in plan.mini_batches for part in mini_batch for key in part]


def trained_as_planned(plan: StepPlan) -> set[int]:
    """Return what `train_step` returns if it trains each sample of its plan once."""
    return check_trained(plan, planned_keys(plan))
