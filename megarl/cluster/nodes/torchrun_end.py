"""The time that torchrun waits for its ranks after a stop signal: what they have said that a step and a save may take.

torchrun (torch 2.13, elastic/agent/server/api.py) passes SIGTERM or SIGINT on to its ranks and kills them after its
`--shutdown-timeout`, by default 30 s, which may cut a save. It has no config. So rank 0 puts the seconds that it needs
into the store that torchrun serves for the ranks, signed with a key that torchrun has made and its ranks inherit. Where
the user has chosen a time-out, that one holds. A second signal is answered within torchrun's own bound.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from megarl.cluster.nodes.rendezvous_mark import CHOSEN_VARIABLE
from megarl.common.bound_store import connect_store
from megarl.common.errors import NotAuthentic
from megarl.common.signed_values import sign, verify

if TYPE_CHECKING:
    from torch.distributed import Store

KEY_VARIABLE = "MEGARL_TORCHRUN_KEY"
MOST_S = 86400
_NAME = "seconds that the ranks need to stop"
_OPTIONS = ("--shutdown-timeout", "--shutdown_timeout")
_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # the first one stands for the option

_shutdown = LocalElasticAgent._shutdown
_stores: list[Store] = []  # that this torchrun serves for its ranks: one, once they have met


def wait_for_ranks() -> None:
    """Let the torchrun of this process wait after a stop signal as long as its ranks will have told.

    If the user has chosen how long, it is left at that, and the ranks are told.
    """
    os.environ[KEY_VARIABLE] = secrets.token_hex(32)
    chosen = chosen_seconds(sys.argv, os.environ)
    if chosen is None:
        LocalElasticAgent._shutdown = _patiently  # type: ignore[method-assign,assignment]
    else:
        os.environ[CHOSEN_VARIABLE] = str(chosen)


def serves(store: Store) -> None:
    """Note the store in which the ranks of this torchrun tell their seconds."""
    _stores[:] = [store]


def tell_seconds_to_stop(environment: Mapping[str, str], seconds: int, timeout_s: float) -> None:
    """Tell the torchrun that has started this rank how long its ranks may need after a stop signal.

    `environment`: that of the rank; without torchrun's store, or from a torchrun with another rendezvous, nothing is
    told. `timeout_s`: of a request to the store.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or KEY_VARIABLE not in environment:
        return
    store = connect_store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout_s)
    store.set(_NAME, sign(bytes.fromhex(environment[KEY_VARIABLE]), _NAME, str(seconds)))


def chosen_seconds(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the time-out that the user has chosen for a torchrun with these arguments; None: torch's default holds."""
    for number, each in enumerate(arguments):
        option, _, value = each.partition("=")
        if option in _OPTIONS:
            return int(value or arguments[number + 1])
    return next((int(environment[name]) for name in _VARIABLES if name in environment), None)


def _patiently(agent: LocalElasticAgent, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """Stand in for torch's `_shutdown`, which gets a signal as its argument only for the first one that has come."""
    if death_sig is None:
        _shutdown(agent, timeout=timeout)
    else:
        _shutdown(agent, death_sig, max(timeout, _told_seconds()))


def _told_seconds() -> int:
    """Return the seconds that the ranks have told; 0 if they have told none, as before they have met."""
    with contextlib.suppress(NotAuthentic, ValueError, RuntimeError):  # torch's errors of stores are RuntimeErrors
        for store in _stores:
            if store.check([_NAME]):
                return min(MOST_S, int(verify(bytes.fromhex(os.environ[KEY_VARIABLE]), _NAME, store.get(_NAME))))
    return 0
