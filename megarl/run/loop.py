"""The loop. Synchronous, one-step-off and fully asynchronous training differ in the admission policy, not here."""

from __future__ import annotations

from megarl.run.session import Session
from megarl.run.step import plan_step, train_step


def train(session: Session) -> None:
    """Publish the first version, then: take a batch, update, publish, until `run.steps` are done. Collective.

    Version v are the weights after v steps; step s (from 0) trains on what version s sampled, less what is stale. A
    resumed run starts with the step after its checkpoint; one that is asked to stop saves and ends between two steps,
    with `session.stopped` set.
    """
    config, policy, timer = session.config, session.policy, session.timer
    session.publish(version=session.first_step)
    if session.first_step == 0:
        session.evaluate("before")
    session.start_clock()
    for step in session.steps(session.first_step):
        session.admit()
        batch = session.take_batch(step)
        plan = plan_step(batch.tags, config, dp_size=session.dp_size, version=step)
        rows = session.fetch(batch, plan)
        with session.keep_batch_on_failure(batch):
            train_step(policy, plan, rows, config, timer, session.metrics)
        session.commit(batch, plan)
        session.publish(version=step + 1)
        session.log_step(batch, plan)
        if session.evaluation_due(step + 1):
            session.evaluate(f"step_{step + 1}")
        session.checkpoint(step + 1)
    if session.stopped is None:
        session.evaluate("after")
        session.export()
