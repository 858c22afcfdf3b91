"""The training loop. It is the same for every mode: the admission policy decides how far sampling runs ahead."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from megarl.common.errors import RolloutError
from megarl.config.derived.staleness import pace_of
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.run.loop.batches import PreparedBatch
from megarl.run.loop.session import Session
from megarl.run.step.step import train_step
from megarl.trainer.policy import StepRefused

T = TypeVar("T")

# Publications in a row for one awaited evaluation, which restarts after each. Without the bound, a prompt that ends its
# engine would end every new engine. A batch and an evaluation alongside training need no bound: their responses
# continue, and fail after some attempts.
MOST_PUBLICATIONS = 3


def train(session: Session) -> None:
    """Take batches and update the policy until `run.steps` are done; publish its weights at the config's intervals.

    Collective. If generation runs ahead, the next batch is prepared while one trains. A resumed run starts with the
    step after its checkpoint. After a stop request the run saves and ends between two steps, with `session.stopped`
    set.
    """
    config, policy, pool, recorder = session.config, session.policy, session.pool, session.recorder
    pace = pace_of(config)
    publish(session)
    if session.first_step == 0:
        evaluate(session, 0, "before")
    else:
        publish_as_needed(session, lambda: session.evaluations.resume(session.version), most=MOST_PUBLICATIONS)
        session.keep_evaluation()
    recorder.start_clock(session.first_step)
    for step in session.steps():
        batch = take_batch(session, step)
        plan, timings = batch.plan, batch.timings
        trained: set[int] = set()
        policy.show_images(batch.files)
        try:
            with session.batches.keep_on_failure(batch):
                trained = train_step(
                    policy, plan, batch.rows, config, recorder.timer, recorder.metrics, step=step,
                    watch=session.monitor.watch,
                )  # fmt: skip
        except StepRefused as error:
            plan = session.skip(error, plan)
        session.refresh_reference(step + 1)
        recorder.samples(step, batch.samples)
        policy.show_images({})
        del batch  # its rows then take no room next to those of the next batch and of the one being prepared
        counted = pool.commit(step, plan)
        session.version += pace.updates_per_step
        alarmed = session.monitor.act(session.version)
        if evaluation_due(session, step + 1):
            finish_evaluation(session, step + 1)  # so that the next one finds all replicas with the newest weights
        session.copy_state(step + 1)
        if alarmed or pace.publishes_after(step + 1) or publishes_early(session, step, timings):
            publish(session)
        recorder.step(step, plan, timings, trained, session.version, counted)
        session.evaluations.collect(step + 1)
        if evaluation_due(session, step + 1) and step + 1 < config.run.steps:
            evaluate(session, step + 1, f"step_{step + 1}")
        session.checkpoint(step + 1)
    if session.stopped is None and not evaluate(session, config.run.steps, "after"):
        session.stop_before_the_end()
    if session.stopped is None:
        session.export()


def take_batch(session: Session, step: int) -> PreparedBatch:
    """Return the batch of a step; GPUs that engines share are then the trainer's. Collective.

    With shared GPUs, the first step after a publication waits until engines have generated all steps up to the next
    one. Later steps find their batches ready, unless the pool has lost them.
    """

    def take() -> PreparedBatch | PublicationNeeded:
        session.pool.admit(step)
        return session.batches.take(step, session.version, asleep=session.gpus.engines_sleep)

    batch = publish_as_needed(session, take)
    session.gpus.train()
    return batch


def evaluate(session: Session, steps_done: int, label: str) -> bool:
    """Evaluate the just published weights, or start to; False if a stop request has ended it. Collective."""
    return publish_as_needed(
        session,
        lambda: session.evaluations.evaluate(steps_done, session.version, label),
        most=MOST_PUBLICATIONS,
    )


def finish_evaluation(session: Session, steps_done: int) -> None:
    """Wait for the evaluation that runs alongside training, if there is one, and record it. Collective."""
    publish_as_needed(session, lambda: session.evaluations.finish(steps_done))


def publish_as_needed(session: Session, ask: Callable[[], T | PublicationNeeded], *, most: float = math.inf) -> T:
    """Return what `ask` returns. Collective.

    If all engines are lost meanwhile, a publication of the present weights brings new ones, and `ask` is called again.
    Raises RolloutError if all engines are lost again after `most` publications.
    """
    made = 0
    while isinstance(answer := ask(), PublicationNeeded):
        if made >= most:
            raise RolloutError(
                f"an evaluation was started {made + 1} times, and each time all engines were lost: one of its prompts "
                f"may crash every engine that works on it. The last reason: {answer.reason}"
            )
        made += 1
        session.recorder.say(f"no engine serves; publishing version {session.version}: {answer.reason}")
        publish(session, drain=False)
    return answer


def publish(session: Session, *, drain: bool = True) -> None:
    """Send the policy's weights to every engine, which then serves their version. Collective.

    Without `rollout.partial_rollout` all running responses end first, unless no engine is left (`drain` is false) or
    they sleep: what waits for them has not begun.
    """
    version = session.version
    if drain and not session.config.rollout.partial_rollout and not session.gpus.engines_sleep:
        with session.recorder.phase("drain", f"waiting for running responses before version {version}"):
            session.pool.drain()
    session.gpus.publish()
    session.pool.announce(version)
    with session.recorder.phase("sync", f"publishing version {version}"):
        session.recorder.sync(version, session.sender.publish(version))
        session.gpus.generate()
    session.pool.set_version(version)


def publishes_early(session: Session, step: int, timings: Mapping[str, float]) -> bool:
    """Return whether to publish the weights out of turn after `step`. `timings`: those of its batch.

    True before an evaluation, also at the end of the run, and if replicas were lost: a new replica refuses to generate
    before a publication. Engines that sleep until the next publication would not generate before it.
    """
    lost = timings.get("rollout/replicas_lost", 0.0) > 0 and not session.gpus.shared
    return lost or evaluation_due(session, step + 1)


def evaluation_due(session: Session, steps_done: int) -> bool:
    """Return whether an evaluation is due: every `evaluation.every` steps, and after the last one."""
    every = session.config.evaluation.every
    return steps_done == session.config.run.steps or (bool(every) and steps_done % every == 0)
