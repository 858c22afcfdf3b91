"""Attempts to get out of the sandbox: programs that print `ESCAPED` if they succeed, and the things that they go for.

`python -m tests.support.attacks.escape_attempts` runs them all in the sandbox of its own user, with the targets as
things of that user. It prints a JSON object: what each of them has printed, and its status. It needs no package but
megarl.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.sandbox.limits import Limits
from megarl.sandbox.runner import Sandbox

ESCAPED = "ESCAPED"
SHOWN = "succeeded outside the sandbox and failed in it"  # the property of a test that has shown both; see conftest.py
SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return result, ctypes.get_errno()
"""


@dataclass
class Host:
    """The targets outside: a directory of ours, a secret, servers, and a process that it may attack."""

    directory: Path
    word: str
    port: int
    victim: int
    victims_address: int

    def fill(self, program: str) -> str:
        """The program with the names of the host's things in it."""
        for name in ("directory", "word", "port", "victim", "victims_address"):
            program = program.replace(f"@{name}@", str(getattr(self, name)))
        return program


VICTIM = """
import ctypes, sys, time
buffer = ctypes.create_string_buffer(sys.argv[1].encode())
print(ctypes.addressof(buffer), flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def host_in(directory: Path) -> Iterator[Host]:
    """Make the targets, as things of this process's user."""
    word = uuid.uuid4().hex
    (directory / "secret").write_text(word)
    (directory / "secret").chmod(0o600)
    (directory / "public").write_text(word)
    directory.chmod(0o755)
    with contextlib.ExitStack() as closing:
        tcp = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = closing.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(directory / "socket"))
        abstract = closing.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{word}")
        for server in (unix, abstract):
            server.listen(8)
        for server in (tcp, unix, abstract):
            threading.Thread(target=answer, args=(server,), daemon=True).start()
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, word], stdout=subprocess.PIPE, text=True)
        closing.callback(victim.wait)
        closing.callback(victim.kill)
        assert victim.stdout is not None
        address = int(victim.stdout.readline())
        yield Host(directory, word, tcp.getsockname()[1], victim.pid, address)


def answer(server: socket.socket) -> None:
    """Answer every connection until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")


ATTEMPTS: dict[str, str] = {
    # --- files
    "read a file of ours": "print('ESCAPED' if open('@directory@/public').read() == '@word@' else 'no')",
    "read a secret file": "print('ESCAPED' if open('@directory@/secret').read() == '@word@' else 'no')",
    "read the users of the host": "print('ESCAPED' if 'root:' in open('/etc/passwd').read() else 'no')",
    "list the host's home directories": """
import os, sys
paths = [path for path in ("/home", "/root", "/tmp", "/var", "/opt") if os.path.isdir(path)]
names = {name for path in paths for name in os.listdir(path)}
print("ESCAPED" if names - set(sys.base_prefix.split("/")) else "no")
""",
    "write outside the scratch directory": """
import os
open("@directory@/written", "w").write("x")
os.unlink("@directory@/written")
print("ESCAPED")
""",
    "follow a link out": """
import os, tempfile
os.chdir(tempfile.mkdtemp())
os.symlink("@directory@/public", "link")
print("ESCAPED" if open("link").read() == "@word@" else "no")
""",
    "go up out of the root": "print('ESCAPED' if open('../' * 40 + '@directory@/public').read() == '@word@' else 'no')",
    "look through the root of another process": """
print("ESCAPED" if open("/proc/@victim@/root@directory@/public").read() == "@word@" else "no")
""",
    "look through the root of the parent": """
import os
print("ESCAPED" if os.path.exists(f"/proc/{os.getppid()}/root@directory@/public") else "no")
""",
    "change the Python installation": """
import os, sysconfig
path = os.path.join(sysconfig.get_path("stdlib"), "__megarl_escape__.py")
open(path, "w").close()
os.unlink(path)
print("ESCAPED")
""",
    "leave a sitecustomize for the next program": """
import os, site, sys
folder = site.getsitepackages()[0]
path = os.path.join(folder, "__megarl_sitecustomize__.py")
open(path, "w").close()
os.unlink(path)
print("ESCAPED")
""",
    "reach a device of the host": """
import os
own = {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout", "stderr"}
found = {name for name in os.listdir("/dev") if os.path.realpath(f"/dev/{name}") != "/scratch"}
print("ESCAPED" if found - own else "no")
""",
    "make a device": """
import os, stat, tempfile
path = tempfile.mktemp()
os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 200))
os.unlink(path)
print("ESCAPED")
""",
    "write into the kernel's settings": """
path = "/proc/sys/kernel/panic_on_oops"
open(path, "r+").write(open(path).read())
print("ESCAPED")
""",
    # --- processes
    "see another process": "import os; print('ESCAPED' if os.path.exists('/proc/@victim@/cmdline') else 'no')",
    "read the environment of another process": """
import os
mine = b"HOME"
print("ESCAPED" if any(open(f"/proc/{pid}/environ", "rb").read() for pid in ("@victim@",)) else "no")
""",
    "read the memory of another process": """
with open("/proc/@victim@/mem", "rb") as file:
    file.seek(@victims_address@)
    print("ESCAPED" if file.read(32) == b"@word@" else "no")
""",
    "signal another process": "import os; os.kill(@victim@, 0); print('ESCAPED')",
    "signal the parent": """
import os, signal
os.kill(os.getppid(), signal.SIGCONT)
# In the sandbox the parent is the namespace's init, which is no process of the host's.
print("ESCAPED" if os.getppid() != 1 else "no")
""",
    "read a descriptor of the parent": """
import os
names = os.listdir(f"/proc/{os.getppid()}/fd")
print("ESCAPED" if names else "no")
""",
    "write the memory of the namespace's init": """
import os
try:
    descriptor = os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)
except OSError:
    print("no")
else:
    print("ESCAPED")
""",
    "ptrace": SYSCALL + "print('ESCAPED' if call(101, 117, 16, @victim@, 0, 0)[0] == 0 else 'no')",
    "process_vm_readv": SYSCALL + """
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
own = ctypes.create_string_buffer(32)
here, there = Part(ctypes.addressof(own), 32), Part(@victims_address@, 32)
call(310, 270, @victim@, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("ESCAPED" if own.raw == b"@word@" else "no")
""",
    # --- network
    "connect to the host": """
import socket
print("ESCAPED" if socket.create_connection(("127.0.0.1", @port@), 20).recv(5) == b"hello" else "no")
""",
    "listen on the loopback": "import socket; socket.create_server(('127.0.0.1', 0)); print('ESCAPED')",
    "connect to a Unix socket": """
import socket
server = socket.socket(socket.AF_UNIX)
server.connect("@directory@/socket")
print("ESCAPED" if server.recv(5) == b"hello" else "no")
""",
    "connect to an abstract Unix socket": """
import socket
server = socket.socket(socket.AF_UNIX)
server.connect("\\x00@word@")
print("ESCAPED" if server.recv(5) == b"hello" else "no")
""",
    "talk to the kernel by netlink": "import socket; socket.socket(16, socket.SOCK_RAW, 0); print('ESCAPED')",
    "send a datagram": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', @port@)); print('ESCAPED')",
    # --- calls of the kernel
    "unshare a user namespace": SYSCALL + "print('ESCAPED' if call(272, 97, 0x10000000)[0] == 0 else 'no')",
    "clone a user namespace": SYSCALL + """
pid, _ = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
print("ESCAPED" if pid > 0 else "no")
""",
    "clone3": SYSCALL + """
request = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17, 0, 0, 0)
pid, _ = call(435, 435, ctypes.byref(request), 64)
if pid == 0: os._exit(0)
print("ESCAPED" if pid > 0 else "no")
""",
    "memory that no limit counts": SYSCALL + "print('ESCAPED' if call(319, 279, b'x', 0)[0] >= 0 else 'no')",
    "System V shared memory": SYSCALL + """
identity, _ = call(29, 194, 0, 4096, 0o1600)
if identity >= 0: call(31, 195, identity, 0, None)
print("ESCAPED" if identity >= 0 else "no")
""",
    "keyrings": SYSCALL + "print('ESCAPED' if call(250, 219, 0, -3, 0)[0] > 0 else 'no')",
    "a key of one's own": SYSCALL + """
key, _ = call(248, 217, b"user", b"megarl_escape", b"x", 1, -1)
print("ESCAPED" if key > 0 else "no")
""",
    "personality": SYSCALL + "print('ESCAPED' if call(135, 92, 0xFFFFFFFF)[0] >= 0 else 'no')",
    "pidfd of another process": SYSCALL + "print('ESCAPED' if call(434, 434, @victim@, 0)[0] >= 0 else 'no')",
    "file handles": SYSCALL + """
handle, mount = (ctypes.c_uint32 * 34)(128), ctypes.c_int()
result, _ = call(303, 264, -100, b"/usr/lib", ctypes.byref(handle), ctypes.byref(mount), 0)
print("ESCAPED" if result == 0 else "no")
""",
    "inotify": SYSCALL + "print('ESCAPED' if call(294, 26, 0)[0] >= 0 else 'no')",
    "io_uring": SYSCALL + "print('ESCAPED' if call(425, 425, 4, (ctypes.c_uint32 * 64)())[0] >= 0 else 'no')",
    "userfaultfd": SYSCALL + "print('ESCAPED' if call(323, 282, 1)[0] >= 0 else 'no')",
    "the mounts of the host": """
print("ESCAPED" if any(line.split()[1] == "/sys" for line in open("/proc/mounts")) else "no")
""",
    # --- the environment
    "secrets in the environment": "import os; print('ESCAPED' if os.environ.get('MEGARL_SECRET') else 'no')",
    "an environment for the interpreter": "import os; print('ESCAPED' if os.environ.get('PYTHONSTARTUP') else 'no')",
    "the name of the host": "import socket; print('ESCAPED' if socket.gethostname() != 'sandbox' else 'no')",
}  # fmt: skip

FOR_ROOT: dict[str, str] = {
    "read the passwords of the host": "print('ESCAPED' if open('/etc/shadow').read() else 'no')",
    "change the user": "import os; os.setresuid(1234, 1234, 1234); print('ESCAPED')",
    "change the groups": "import os; os.setgroups([0]); print('ESCAPED')",
    "chroot": SYSCALL + "print('ESCAPED' if call(161, 51, b'/')[0] == 0 else 'no')",
    "mount": "import os\n" + SYSCALL + """
pid = os.fork()
if pid == 0:  # in a namespace of its own, so that the host's mounts do not change
    call(272, 97, 0x20000)
    os._exit(0 if call(165, 40, b"none", b"/", None, 1 << 14 | 1 << 18, None)[0] == 0 else 1)
print("ESCAPED" if os.waitpid(pid, 0)[1] == 0 else "no")
""",
    "the new calls for mounts": SYSCALL + "print('ESCAPED' if call(430, 430, b'tmpfs', 0)[0] >= 0 else 'no')",
    "set the name of the host": "import socket; socket.sethostname(socket.gethostname()); print('ESCAPED')",
    "enter the namespaces of init": """
import os
print("ESCAPED" if os.readlink("/proc/@victim@/ns/net") else "no")
""",
    "a higher limit": """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
print("ESCAPED")
""",
    "a better priority": "import os; os.nice(-1); print('ESCAPED')",
    "bpf": SYSCALL + """
request = (ctypes.c_uint32 * 16)(2, 4, 4, 1)  # an array of one number
print("ESCAPED" if call(321, 280, 0, ctypes.byref(request), 64)[0] >= 0 else "no")
""",
    "performance counters": SYSCALL + """
request = (ctypes.c_uint8 * 128)()
request[0], request[4] = 1, 112  # a software counter, in the first form of the request
print("ESCAPED" if call(298, 241, ctypes.byref(request), 0, -1, -1, 0)[0] >= 0 else "no")
""",
    # Others may type only into the terminal that is their own, and newer kernels forbid that, too, by default.
    "type into a terminal": """
import fcntl, os, pty, sys
try:
    pid, master = pty.fork()
except OSError:
    pid = -1  # there are no terminals here: the call alone is tried, which the kernel refuses before it looks at it
if pid <= 0:
    fcntl.ioctl(0, 0x5412, b"~")
    fcntl.ioctl(0, 0x5412, b"\\n")
    print("ESCAPED" if pid < 0 else "", flush=True)
    sys.stdin.readline()
    os._exit(0)
typed = b""
while b"~" not in typed:
    typed += os.read(master, 100)
print("ESCAPED")
os.close(master)
os.waitpid(pid, 0)
""",
    "the log of the kernel": SYSCALL + "print('ESCAPED' if call(103, 116, 10, None, 0)[0] >= 0 else 'no')",
}  # fmt: skip
ALL = {**ATTEMPTS, **FOR_ROOT}
SECRETS = {"MEGARL_SECRET": "x", "PYTHONSTARTUP": "/nowhere"}


def main() -> None:
    """Run the attempts one after the other."""
    os.environ.update(SECRETS)
    sandbox, found = Sandbox(Limits(cpu_s=30), slots=1), dict[str, tuple[str, int | None]]()
    with tempfile.TemporaryDirectory() as name, host_in(Path(name)) as host:
        for attempt, program in {**ALL, "the ids": IDS}.items():
            result = sandbox.run_now(host.fill(program), timeout_s=60.0)
            found[attempt] = (result.stdout, result.status)
    sandbox.close()
    print(json.dumps(found))


# In the user namespace only the caller's id exists.
IDS = """
print(open("/proc/self/uid_map").read().split()[1:], *(line.split()[1] for line in open("/proc/self/status")
      if line.split(":")[0] in ("Uid", "Gid", "CapEff", "CapBnd")))
"""

if __name__ == "__main__":
    main()
