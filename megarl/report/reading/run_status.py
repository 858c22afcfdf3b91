"""The status of a run, as its directory tells it, for `megarl report` and `megarl top`."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.common.process.processes import is_alive
from megarl.common.rundir.run_files import ExitRecordError, read_exit, stop_reason
from megarl.common.rundir.run_lock import Sighting, this_place

SILENT_S = 900.0  # without a step, after which a run of another host may have ended


def status_of(run_dir: Path, silent_s: float) -> tuple[str, str]:
    """Return the status of a run and its reason. `silent_s`: since its newest step; NaN without one.

    The status is that of its exit record, or else running, silent, starting, ended or unknown.
    """
    try:
        record = read_exit(run_dir)
    except (ExitRecordError, OSError) as error:
        return "unknown", str(error)
    if record is not None:
        return record.status, record.reason
    stop = stop_reason(run_dir)
    said = f"stops at the next step: {stop}" if stop is not None else ""
    holder = seen.holder if (seen := Sighting.of(run_dir)) is not None else None
    if seen is None or (holder is not None and holder.place == this_place() and not is_alive(holder.process)):
        return "ended", "it has left no exit record: it was killed"
    if math.isnan(silent_s):
        return "starting", said
    if silent_s > SILENT_S:
        return "silent", said or "no step was written lately"
    return "running", said
