"""No message of a stranger is decoded at any socket of TransferQueue; as the library makes them, each decodes it."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import zmq

import tests.support.pool.ray_token  # noqa: F401  # the token from which the keys derive
from megarl.queue import socket_auth
from megarl.queue.socket_auth import create_locked_socket, key_pair
from megarl.queue.transfer import quiet_library
from tests.support.attacks.queue_attack import admitted, attack, malicious_frames
from tests.support.checkout import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SOCKETS = (("controller", "handshake_socket"), ("controller", "request_handle_socket"), ("storage", "put_get_socket"))
RAN_S = 20.0


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.rollout.queue_servers"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def library() -> Any:
    """The library's own function that makes sockets."""
    quiet_library()
    socket_auth.lock()
    return create_locked_socket.__wrapped__  # type: ignore[attr-defined]


def address(servers: dict[str, Any], kind: str, owner: str, name: str) -> str:
    return f"tcp://127.0.0.1:{servers[kind][owner]['ports'][name]}"


@pytest.mark.parametrize(("owner", "name"), SOCKETS)
def test_each_socket_of_the_library_runs_a_strangers_code(
    servers: dict[str, Any], tmp_path: Path, owner: str, name: str
) -> None:
    path = tmp_path / "ran"
    assert attack(address(servers, "open", owner, name), path)
    wait_until(path.exists, RAN_S, "the pickle to run")


@pytest.mark.parametrize(("owner", "name"), SOCKETS)
@pytest.mark.parametrize("knows", ["nothing", "its own keys", "the server's public key", "the clients' public key"])
def test_each_locked_socket_refuses_a_stranger(
    servers: dict[str, Any], tmp_path: Path, owner: str, name: str, knows: str
) -> None:
    server = key_pair("server").public if "public key" in knows else zmq.curve_keypair()[0]
    public, secret = zmq.curve_keypair()
    if "clients" in knows:
        public = key_pair("client").public
    keys = None if knows == "nothing" else (server, public, secret)
    path = tmp_path / "ran"
    assert not attack(address(servers, "locked", owner, name), path, keys)
    assert not path.exists()


@pytest.mark.parametrize(("owner", "name"), SOCKETS)
def test_the_lock_is_the_keys_and_nothing_else(servers: dict[str, Any], tmp_path: Path, owner: str, name: str) -> None:
    """The same message is decoded with the run's keys: what refuses a stranger is not an error of the attack."""
    client = key_pair("client")
    path = tmp_path / "ran"
    assert attack(
        address(servers, "locked", owner, name), path, (key_pair("server").public, client.public, client.secret)
    )
    wait_until(path.exists, RAN_S, "the pickle to run")


@pytest.mark.parametrize("locked", [False, True])
def test_a_client_reads_no_answer_of_an_impostor(library: Any, tmp_path: Path, locked: bool) -> None:
    """The impostor listens where a controller was; it gets no request either."""
    from transfer_queue.utils.zmq_utils import ZMQMessage

    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    socket = (create_locked_socket if locked else library)(context, zmq.DEALER, "127.0.0.1", b"client")
    outcome = socket.get_monitor_socket()
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"request"])
    path = tmp_path / "ran"
    try:
        assert admitted(outcome) is not locked
        assert bool(impostor.poll(200)) is not locked
        if not locked:
            impostor.send_multipart([impostor.recv_multipart()[0], *malicious_frames(path)])
            assert socket.poll(20_000)
            with pytest.raises(TypeError):  # the message is what `touch` returned
                ZMQMessage.deserialize(socket.recv_multipart(copy=False))
        assert path.exists() is not locked
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


def test_without_an_answer_about_a_client_it_is_refused(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_auth, "_answer_for", lambda ctx: None)
    context, client = zmq.Context(), key_pair("client")
    router = create_locked_socket(context, zmq.ROUTER, "127.0.0.1")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        keys = (key_pair("server").public, client.public, client.secret)
        assert not attack(f"tcp://127.0.0.1:{port}", tmp_path / "ran", keys)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("one_pair", [True, False], ids=["one pair of keys for both sides", "a pair for each side"])
def test_a_client_cannot_pass_for_the_server(library: Any, one_pair: bool) -> None:
    """A process that has the client's keys only, because it left them somewhere, cannot answer in the server's name."""
    context = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.curve_server, impostor.curve_secretkey = 1, key_pair("client").secret
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    socket = create_locked_socket(context, zmq.DEALER, "127.0.0.1", b"client")
    if one_pair:
        socket.curve_serverkey = key_pair("client").public
    outcome = socket.get_monitor_socket()
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"request"])
    try:
        assert admitted(outcome) is one_pair
        assert bool(impostor.poll(200)) is one_pair
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


def test_a_context_ends_although_a_thread_answers_for_it(library: Any) -> None:
    """The library's storage unit waits for its context when it ends."""
    context = zmq.Context()
    for _ in range(2):  # the second finds the thread of the first
        create_locked_socket(context, zmq.ROUTER, "127.0.0.1").close()
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "queue-admission"]


def test_a_socket_of_another_type_is_refused(library: Any) -> None:
    with zmq.Context() as context, pytest.raises(ValueError, match="cannot lock"):
        create_locked_socket(context, zmq.PULL, "127.0.0.1")


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.12")
    with pytest.raises(RuntimeError, match=r"lock TransferQueue 0\.1\.11, but 0\.1\.12 is installed"):
        socket_auth.lock()


def test_the_library_makes_its_sockets_nowhere_else() -> None:
    """One call makes every socket; who imports it by name is patched."""
    import transfer_queue

    root = Path(transfer_queue.__file__).parent
    texts = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    assert [name for name, text in texts.items() if "ctx.socket(" in text or "context.socket(" in text] == [
        "utils/zmq_utils.py"
    ]
    assert texts["utils/zmq_utils.py"].count("ctx.socket(") == 1
    users = {name for name, text in texts.items() if "create_zmq_socket" in text}
    assert users == {
        "controller.py", "storage/managers/base.py", "storage/simple_storage.py", "utils/zmq_utils.py",
    }  # fmt: skip
