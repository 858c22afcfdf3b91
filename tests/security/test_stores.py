"""A stranger reaches a store of a run. Each attack succeeds on a store of torch as it is, and fails on ours."""

from __future__ import annotations

import base64
import json
import pickle
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from megarl.checkpoint.format.manifest import FileEntry
from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.checkpoint.save.writer import Written, WrittenItem
from megarl.common.errors import NotAuthentic
from megarl.common.trust.run_secret import run_secret
from megarl.common.trust.signed_store import connect_store
from megarl.weights.group.stage import MemberProgress, StageWatch, end_key
from megarl.weights.group.store import SyncStore, open_shared_store
from tests.support.attacks.attack import addresses, attack, reachable

WRITTEN = Written({"__0_0.distcp": FileEntry(3, "ab")}, [WrittenItem("a", (0, 4), None, 3, "f", 0, 3)], None, 0.5)


class Unsigned(SyncStore):
    """A store as it would be without signatures: it takes whatever is JSON."""

    def _signed(self, key: str, value: object) -> str:
        return json.dumps(value)

    def _verified(self, key: str, value: bytes) -> Any:
        return json.loads(value)

    def connection(self) -> Unsigned:
        return Unsigned(self.host, self.port, self.key)


def stranger(store: SyncStore) -> TCPStore:
    """A connection to a store's port by someone who is not of the run."""
    return connect_store(store.host, store.port, 5.0)


def test_a_store_of_torch_answers_at_every_address_and_ours_at_one() -> None:
    unguarded = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert reachable("127.0.0.2", unguarded.port), "torch listens on all addresses, whatever the host says"
    TCPStore("127.0.0.2", unguarded.port, wait_for_workers=False).set("key", "of a stranger")
    assert unguarded.get("key") == b"of a stranger"
    ours = SyncStore("127.0.0.1", 0, server=True)
    assert addresses(ours.port) == {"127.0.0.1"} and not reachable("127.0.0.2", ours.port)


def test_a_pickle_under_the_key_of_a_save_is_run_where_it_is_unpickled(tmp_path: Path) -> None:
    """The review's attack: the keys `save/N/RANK` are guessable."""
    unguarded = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    value = json.dumps(base64.b64encode(attack(tmp_path / "ran")).decode())
    TCPStore("127.0.0.2", unguarded.port, wait_for_workers=False).set("save/1/0", value)
    pickle.loads(base64.b64decode(json.loads(unguarded.get("save/1/0"))))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("secret_is_known", [False, True])
def test_a_save_runs_nothing_that_is_put_under_its_key(tmp_path: Path, secret_is_known: bool) -> None:
    """Even a value with the right code is JSON of a checked form."""
    store = SyncStore("127.0.0.1", 0, server=True)
    content = base64.b64encode(attack(tmp_path / "ran")).decode()
    if secret_is_known:
        store.put("save/1/0", content)
    else:
        stranger(store).set("save/1/0", json.dumps(content))
    pending: Any = SimpleNamespace(key="save/1", step=1, deadline=1e12, outcome=(None, ""))
    rank_0: Any = SimpleNamespace(_world=1, _complete=lambda *_: pytest.fail("the save goes on"))
    Checkpointer._finish(rank_0, pending, store)
    path, error = pending.outcome
    assert path is None and ("Invalid JSON" if secret_is_known else "was not written by a process of this run") in error
    assert not (tmp_path / "ran").exists()


def test_the_result_of_a_writer_arrives_as_it_was() -> None:
    found = Written.from_text(WRITTEN.to_text())
    assert found == WRITTEN and found.items[0].result().index.offset == (0, 4)


@pytest.mark.parametrize("form", ["{}", "[]", '{"files": {}, "items": [{"name": 3}], "error": null, "seconds": 1}'])
def test_the_result_of_a_writer_has_one_form(form: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Written.from_text(form)


def test_a_stranger_can_list_the_keys_but_neither_forge_nor_move_a_value() -> None:
    """Keys are no secret: `list_keys` returns them, so a secret prefix would protect nothing."""
    unguarded = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    unguarded.set("secret-prefix/g0/s1/end", json.dumps({"status": "published"}))
    guest = TCPStore("127.0.0.2", unguarded.port, wait_for_workers=False)
    [listed] = [key for key in guest.list_keys() if "g0/s1/end" in key]
    guest.set(listed.replace("s1", "s2"), guest.get(listed))
    guest.set(listed, json.dumps({"status": "aborted"}))
    assert json.loads(unguarded.get("secret-prefix/g0/s2/end")) == {"status": "published"}
    assert json.loads(unguarded.get("secret-prefix/g0/s1/end")) == {"status": "aborted"}
    store = SyncStore("127.0.0.1", 0, server=True)
    store.put("g0/s1/end", {"status": "published"})
    outside = stranger(store)
    assert "g0/s1/end" in "".join(outside.list_keys())
    replayed = outside.get("g0/s1/end")
    outside.set("g0/s2/end", replayed)
    outside.set("g0/s1/report/0", json.dumps({"failure": None}))
    for key in ("g0/s2/end", "g0/s1/report/0"):
        for read in (store.get, lambda key: store.block(key, 5.0), lambda key: store.block_all([key], 5.0)):
            with pytest.raises(NotAuthentic, match=key):
                read(key)
        with pytest.raises(NotAuthentic):
            store.put_once(key, {"status": "published"})
        with pytest.raises(NotAuthentic):
            store.wait(key, 5.0, "a value")
    assert store.get("g0/s1/end") == {"status": "published"}
    outside.set("g0/s1/end", bytes([replayed[0] ^ 1]) + replayed[1:])
    with pytest.raises(NotAuthentic):
        store.get("g0/s1/end")


def test_a_store_cannot_be_read_without_its_key() -> None:
    unguarded = Unsigned("127.0.0.1", 0, server=True)
    unguarded.put("key", 1)
    assert Unsigned(unguarded.host, unguarded.port, b"a guess").get("key") == 1
    store = SyncStore("127.0.0.1", 0, server=True)
    store.put("key", 1)
    with pytest.raises(ValueError, match="without its key"):
        SyncStore(store.host, store.port)
    with pytest.raises(NotAuthentic):
        SyncStore(store.host, store.port, b"a guess").get("key")


def test_a_stranger_does_not_abort_a_sync_in_the_name_of_a_member() -> None:
    """The member ends its wait, and says that the value was not of this run. If it took any value, it would abort."""
    unguarded = Unsigned("127.0.0.1", 0, server=True)
    believes = StageWatch(unguarded.connection(), "g0/s0", MemberProgress("engine 0"), "engine 0", 20.0)
    stranger(unguarded).set(end_key("g0/s0"), json.dumps({"abort": "a stranger says so"}))
    assert believes.wait(20.0) == {"abort": "a stranger says so"}
    store = SyncStore("127.0.0.1", 0, server=True)
    watch = StageWatch(store.connection(), "g0/s0", MemberProgress("engine 0"), "engine 0", 20.0)
    stranger(store).set(end_key("g0/s0"), json.dumps({"abort": "a stranger says so"}))
    end = watch.wait(20.0)
    assert end is not None and "was not written by a process of this run" in end["abort"]
    assert "a stranger says so" not in end["abort"]


def shared(secret: bytes, said: list[str], host: str | None) -> SyncStore:
    def share(text: str | None) -> str:
        said.extend([] if text is None else [text])
        return said[-1]

    return open_shared_store("weights/1", secret, host, share)


def test_ranks_share_a_store_over_an_open_channel(tmp_path: Path) -> None:
    secret, said = run_secret(tmp_path), list[str]()
    server = shared(secret, said, "127.0.0.1")
    client = shared(secret, said, None)
    client.put("key", [1])
    assert server.get("key") == [1]
    assert server.key.hex() not in said[0] and secret.hex() not in said[0]


def test_a_rank_does_not_join_the_store_of_a_stranger(tmp_path: Path) -> None:
    secret = run_secret(tmp_path)
    theirs = SyncStore("127.0.0.1", 0, server=True)
    host, port, _ = json.loads(text_of_stranger := json.dumps(["127.0.0.1", theirs.port, "0"]))
    connect_store(host, port, 5.0).set("key", "of the rank")
    assert stranger(theirs).get("key") == b"of the rank", "without a signature a rank would join it"
    for text in (text_of_stranger, "", "x" * 200):
        with pytest.raises(NotAuthentic, match="weights/1"):
            shared(secret, [text], None)
    with pytest.raises(NotAuthentic):
        open_shared_store("weights/2", secret, None, lambda _: _said_of_another(secret))


def _said_of_another(secret: bytes) -> str:
    said: list[str] = []
    shared(secret, said, "127.0.0.1")
    return said[0]


def test_values_of_an_earlier_store_of_the_run_are_refused(tmp_path: Path) -> None:
    """A stranger has recorded what another start of the run held under the same key.

    Two stores that sign with the secret of the run itself would take it.
    """
    secret = run_secret(tmp_path)
    before, after = (SyncStore("127.0.0.1", 0, secret, server=True) for _ in range(2))
    before.put("g0/members", {"error": "of the earlier start"})
    stranger(after).set("g0/members", stranger(before).get("g0/members"))
    assert after.get("g0/members") == {"error": "of the earlier start"}
    earlier, later = (shared(secret, [], "127.0.0.1") for _ in range(2))
    earlier.put("g0/members", {"error": "of the earlier start"})
    stranger(later).set("g0/members", stranger(earlier).get("g0/members"))
    with pytest.raises(NotAuthentic, match="g0/members"):
        later.get("g0/members")


def test_a_blocking_wait_of_ours_is_not_ended_by_another_name() -> None:
    store = SyncStore("127.0.0.1", 0, server=True)
    outside = stranger(store)
    timer = threading.Timer(0.1, lambda: outside.set("other", "x"))
    timer.start()
    assert store.connection().block("key", 0.5) is None
    timer.join(timedelta(seconds=5).total_seconds())


def test_every_rank_learns_that_the_store_cannot_be_served(tmp_path: Path) -> None:
    secret, said = run_secret(tmp_path), list[str]()
    with pytest.raises(Exception, match="") as served:
        shared(secret, said, "192.0.2.1")  # an address that no machine has
    with pytest.raises(ConnectionError, match="'weights/1' could not be served") as joined:
        shared(secret, said, None)
    assert str(served.value) in str(joined.value)
