"""The part of the soak that tests may use: its faults, the runs that they hit, and what is judged of them."""

from benchmarks.chaos.injector import Injector
from benchmarks.chaos.kinds import KINDS, Fault, Happened, Kind, missing, schedule
from benchmarks.chaos.rows import (
    POINTS,
    REPLICAS,
    SoakOutcome,
    accounting_rows,
    end_rows,
    loss_rows,
    rows_of,
)
from benchmarks.chaos.run import Tempo, run_once
from benchmarks.chaos.watch import version_being_published

__all__ = [
    "KINDS",
    "POINTS",
    "REPLICAS",
    "Fault",
    "Happened",
    "Injector",
    "Kind",
    "SoakOutcome",
    "Tempo",
    "accounting_rows",
    "end_rows",
    "loss_rows",
    "missing",
    "rows_of",
    "run_once",
    "schedule",
    "version_being_published",
]
