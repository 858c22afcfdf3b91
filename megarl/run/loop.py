"""The training loop, the same however far sampling may run ahead of training: the admission policy decides that."""

from __future__ import annotations

from megarl.config.pace import pace_of
from megarl.run.session import Session
from megarl.run.step import train_step
from megarl.run.step_batch import StepBatch
from megarl.trainer.policy import NonFiniteError


def train(session: Session) -> None:
    """Take batches and update the policy until `run.steps` are done; publish its weights at the config's intervals.

    Collective. If generation runs ahead, the next batch is prepared while one trains. A resumed run starts with the
    step after its checkpoint. A run that is asked to stop saves and ends between two steps, with `session.stopped` set.
    """
    config, policy, pool, recorder = session.config, session.policy, session.pool, session.recorder
    pace = pace_of(config)
    publish(session)
    if session.first_step == 0:
        session.evaluations.evaluate(0, session.version, "before")
    else:
        session.evaluations.resume(session.version)
    recorder.start_clock()
    for step in session.steps():
        pool.admit(step)
        prepared = session.batches.take(step, session.version)
        batch, plan = prepared.batch, prepared.plan
        try:
            with pool.keep_batch_on_failure(batch):
                train_step(
                    policy, plan, prepared.rows, config, recorder.timer, recorder.metrics, step=step,
                    early=prepared.early,
                )  # fmt: skip
        except NonFiniteError as error:
            plan = session.skip(error, plan)
        recorder.samples(batch, prepared.samples)
        pool.commit(batch, plan)
        session.version += pace.updates_per_step
        if evaluation_due(session, step + 1):
            session.evaluations.finish(step + 1)  # so that the next one finds all replicas with the newest weights
        if pace.publishes_after(step + 1) or publishes_early(session, batch):
            publish(session)
        recorder.step(batch, plan, session.version)
        session.evaluations.collect(step + 1)
        if evaluation_due(session, step + 1) and step + 1 < config.run.steps:
            session.evaluations.evaluate(step + 1, session.version, f"step_{step + 1}")
        session.checkpoint(step + 1)
    if session.stopped is None:
        session.evaluate_last()
    if session.stopped is None:
        session.export()


def publish(session: Session) -> None:
    """Send the policy's weights to every engine, which then serves their version. Collective.

    Only those that are pinned for an evaluation keep their version. Without `rollout.partial_rollout` all responses
    that engines work on end first.
    """
    version = session.version
    if not session.config.rollout.partial_rollout:
        with session.recorder.phase("drain", f"waiting for running responses before version {version}"):
            session.pool.drain()
    session.pool.announce(version)
    with session.recorder.phase("sync", f"publishing version {version}"):
        session.recorder.sync(version, session.sender.publish(version, session.pool.leave_out()))
    session.pool.set_version(version)


def publishes_early(session: Session, batch: StepBatch) -> bool:
    """Tell whether the weights are published out of turn after the step of `batch`.

    They are before an evaluation, the one at the end of the run included, and if replicas were lost: a new replica has
    no weights, and gets them by a publication, until which it refuses to generate.
    """
    return batch.replicas_are_lost or evaluation_due(session, batch.step + 1)


def evaluation_due(session: Session, steps_done: int) -> bool:
    """Tell whether an evaluation is due: every `evaluation.every` steps, and after the last one."""
    every = session.config.evaluation.every
    return steps_done == session.config.run.steps or (bool(every) and steps_done % every == 0)
