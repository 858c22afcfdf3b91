"""The state of torchrun's rendezvous, which agents unpickle: one that a stranger has set runs no code in ours."""

from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from megarl.cluster.torchrun import NAME
from megarl.cluster.torchrun.rendezvous import SignedBackend
from tests.support.attacks.attack import attack

KEY = b"secret of the run"


@pytest.mark.parametrize("writer", ["no base64", "c10d", "another key", "another run"])
def test_a_state_that_no_agent_of_the_run_has_signed_is_refused(tmp_path: Path, writer: str) -> None:
    """c10d unpickles it: it is read from a port that every user of the network can write to."""
    state, store = attack(tmp_path / "ran"), HashStore()
    others: dict[str, C10dRendezvousBackend] = {
        "c10d": C10dRendezvousBackend(store, "run"),
        "another key": SignedBackend(store, "run", b"guessed"),
        "another run": SignedBackend(store, "other", KEY),
    }
    if writer == "no base64":
        store.set("torch.rendezvous.run", "!")
    else:
        others[writer]._key = "torch.rendezvous.run"
        others[writer].set_state(state)
    own = SignedBackend(store, "run", KEY)
    for read in (own.get_state, lambda: own.set_state(b"own", b"token"), lambda: own.set_state(b"own", 7)):
        with pytest.raises(RendezvousStateError, match="was not written by an agent of this run"):
            read()
    assert not (tmp_path / "ran").exists()


def test_c10d_itself_runs_a_state_that_a_stranger_has_set(tmp_path: Path) -> None:
    store = HashStore()
    agent = create_handler(
        store, C10dRendezvousBackend(store, "run-7"), RendezvousParameters(NAME, "127.0.0.1:0", "run-7", 1, 1)
    )
    C10dRendezvousBackend(store, "run-7").set_state(attack(tmp_path / "ran"))
    with pytest.raises(AttributeError):  # it is no state, but that shows only after it was unpickled
        agent.is_closed()
    assert (tmp_path / "ran").exists()
