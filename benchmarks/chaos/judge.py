"""Judges whether a run is over a fault, and at the price that the fault's kind allows."""

from benchmarks.chaos.actions import Target
from benchmarks.chaos.kinds import Happened
from benchmarks.chaos.processes import Replica, cpu_seconds, ended
from benchmarks.chaos.watch import WatchedRun
from benchmarks.lib.file_faults import refused

REBUILT = {"controller", "queue"}  # each is started again with the other one
AHEAD = 2  # steps of the new controller, with a publication in one of them, after the two for which there were batches
CONTINUED, RESTARTED = "rollout/continued", "sync/restarted_replicas"


class Judge:
    """Judges what a fault has cost a run, which it knows as it was before: torchrun's process, how often that had
    restarted the ranks, and what is hit.
    """

    def __init__(self, watch: WatchedRun, target: Target) -> None:
        self._watch, self._target = watch, target
        self._agent, self._restarts = watch.find_agent(), watch.restarts
        self._least = watch.step

    def judge(self, event: Happened) -> bool:
        """Wait until what was hit is there again and the run goes on; compare what that cost with the fault's kind.

        What is wrong is noted; False if anything is.
        """
        self._least = self._watch.step
        checks = [self._back]
        if event.fault.kind.outcome != "replaced":
            checks += [self._two_more_steps, self._served, self._allowed]
        return all(check(event) for check in [*checks, self._reported, self._refused])

    def _back(self, event: Happened) -> bool:
        """Wait until what was hit is there again."""
        watch, kind, replica, target = self._watch, event.fault.kind, self._target.replica, self._target
        used = 0.0 if replica is None else cpu_seconds(replica.engine)

        def back() -> bool:
            self._least = min(self._least, watch.step)  # a resume goes back to its checkpoint
            if replica is None:
                there = not target.wanted or len(watch.find_processes(kind.target)) >= target.wanted
                return there and ended(target.processes)
            if kind.outcome == "replaced":
                return self._replaced(event, replica)
            return cpu_seconds(replica.engine) > used

        if not watch.recovers(back):
            event.notes.append(f"the {kind.target} was not there again within {watch.RECOVER_S:.0f} s")
            return False
        if kind.outcome == "replaced":
            self._note_new(event)
        return True

    def _replaced(self, event: Happened, old: Replica) -> bool:
        """Return whether a publication has replaced the replica, and all serve.

        If a publication has noticed the loss, the new engine starts while the run goes on, and joins a later one.
        """
        watch = self._watch
        found = [replica.engine.pid for replica in watch.find_replicas().values()]
        complete = len(found) == watch.replicas and old.engine.pid not in found
        return complete and watch.sum(RESTARTED, event.step) >= 1 and watch.all_serve

    def _note_new(self, event: Happened) -> None:
        """Note what the replacement of a replica has taken."""
        watch, since = self._watch, event.step
        event.recovered_s = watch.seconds - event.at_s
        event.notes.append(
            f"replaced {event.recovered_s:.0f} s after it began, {watch.step - since} steps later; "
            f"{watch.sum(RESTARTED, since):.0f} replicas restarted"
        )

    def _two_more_steps(self, event: Happened) -> bool:
        watch = self._watch
        since = watch.step

        def done() -> bool:
            nonlocal since
            self._least, since = min(self._least, watch.step), min(since, watch.step)
            return watch.step >= since + 2

        if not watch.recovers(done):
            event.notes.append(f"no two more steps were done within {watch.RECOVER_S:.0f} s, or the run ended")
            return False
        event.recovered_s = watch.seconds - event.at_s
        return True

    def _served(self, event: Happened) -> bool:
        """Wait for all replicas after a fault of what is rebuilt with the pool."""
        watch, since = self._watch, self._watch.step
        if event.fault.kind.target not in REBUILT:
            return True
        if watch.recovers(lambda: watch.step >= since + AHEAD and watch.all_serve):
            return True
        event.notes.append(f"not all replicas served {AHEAD} steps later within {watch.RECOVER_S:.0f} s")
        return False

    def _allowed(self, event: Happened) -> bool:
        """Compare restarts and steps that were made again with what the kind allows."""
        watch, kind = self._watch, event.fault.kind
        starts = int(watch.find_agent() != self._agent)
        again = watch.restarts - (0 if starts else self._restarts)
        replicas = 0.0 if self._target.replica is None else watch.sum(RESTARTED, event.step)
        event.redone_steps = max(0, event.step - self._least)
        event.notes.append(
            f"two more steps {event.recovered_s:.0f} s after it began, from step {self._least} on; the ranks were "
            f"restarted {again} times ({kind.restarts} are allowed), the job {starts} times ({kind.starts})"
        )
        if replicas:
            event.notes.append(f"{replicas:.0f} replicas restarted, none is allowed")
        if event.redone_steps > kind.redone:
            event.notes.append(f"{event.redone_steps} steps were made again, {kind.redone} are allowed")
        return again <= kind.restarts and starts <= kind.starts and event.redone_steps <= kind.redone and not replicas

    def _reported(self, event: Happened) -> bool:
        """Wait until the run has counted and reported the fault as its kind says.

        Responses that go on elsewhere are counted when they are trained, which may be after the loss is made good.
        """
        watch, kind = self._watch, event.fault.kind
        for metric in (CONTINUED if kind.loses and event.busy else "", kind.metric):
            if metric and not watch.notices(lambda metric=metric: watch.sum(metric, event.step) >= 1):  # type: ignore[misc]
                event.notes.append(f"{metric} has NOT counted it")
                return False
        if not watch.notices(lambda: watch.has_printed(event)):  # a batch may be trained later
            event.notes.append(f"the run has NOT printed: {kind.printed}")
            return False
        return True

    def _refused(self, event: Happened) -> bool:
        """See that a damaged checkpoint was refused."""
        if event.damaged is None or refused(event.damaged):
            return True
        event.notes.append(f"{event.damaged.name} is damaged and was NOT refused")
        return False
