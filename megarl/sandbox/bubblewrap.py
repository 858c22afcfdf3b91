"""The command line of a sandbox: bubblewrap, then dropping root's id, the limits and the program. Pure."""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.sandbox.installation import NOBODY, Installation
from megarl.sandbox.limits import Limits
from megarl.sandbox.packages import NO_PACKAGES, Packages

MIB = 1 << 20
PROGRAM = "/sandbox/program.py"
SCRATCH = "/scratch"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                 ("stderr", "/proc/self/fd/2"), ("shm", SCRATCH))  # fmt: skip

# Runs in the program's interpreter before the program. bubblewrap ties its processes together only late in its start:
# if its parent is killed before, nothing kills them, but then the permission never comes.
_START = f"""
import os, sys
if not os.read(int(sys.argv[1]), 1):
    os._exit(125)
os.close(int(sys.argv[1]))
def start():
    path, system, main = {PROGRAM!r}, sys, sys.modules["__main__"].__dict__
    for name in ("os", "sys", "start"):
        del main[name]
    main["__file__"] = path
    system.argv[:] = [path]
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main)
    except SystemExit:
        raise
    except BaseException as error:
        system.excepthook(type(error), error, error.__traceback__.tb_next)
        raise SystemExit(1) from None
start()
"""


@dataclass(frozen=True)
class Programs:
    """Paths of the programs that start a sandbox."""

    bwrap: str
    prlimit: str
    setpriv: str


@dataclass(frozen=True)
class Descriptors:
    """Descriptors that a run inherits.

    Attributes:
        program: the program's text.
        filter: the system call filter.
        status: receives bubblewrap's report.
        permission: a pipe; the program starts only if it has a byte.
    """

    program: int
    filter: int
    status: int
    permission: int


def command(
    installation: Installation,
    programs: Programs,
    limits: Limits,
    descriptors: Descriptors,
    *,
    mark: str,
    root_as: int | None,
    packages: Packages = NO_PACKAGES,
) -> list[str]:
    """Return the command line, which contains the word `mark`.

    `root_as`: the caller is root, and the program gets this user and group id; None: the program runs in its own user
    namespace, in which only the caller's id exists. Root needs no user namespace: it makes the others with its rights,
    and the program has neither its id nor any of its rights.
    """
    return [
        programs.bwrap,
        *_namespaces(root_as),
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        *_tree(installation, programs, limits, packages, descriptors.program, root_as is not None),
        "--setenv", "HOME", mark,  # the next line overwrites it: the program does not see it
        *_environment(packages),
        "--seccomp", str(descriptors.filter),
        "--json-status-fd", str(descriptors.status),
        "--",
        *_drop_root(programs, root_as),
        programs.prlimit, *_limits(limits),
        installation.python, "-s", "-S", "-P", "-B", "-c", _START, str(descriptors.permission),
    ]  # fmt: skip


def _namespaces(root_as: int | None) -> list[str]:
    shared = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    shared += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    if root_as is None:
        return ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), *shared]
    # What setpriv needs to give up root's id; it has none of them afterwards.
    return [*shared, *(part for each in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{each}"))]


def _tree(
    installation: Installation, programs: Programs, limits: Limits, packages: Packages, program: int, is_root: bool
) -> list[str]:
    """Return the file system's options: an empty tree in which only the scratch directory is writable."""
    files = [*installation.files, installation.python, programs.prlimit, *([programs.setpriv] if is_root else [])]
    mounts = [*((path, path) for path in (*installation.directories, *files)), *packages.mounts]
    arguments: list[str] = []
    for directory in _ancestors([*(path for _, path in mounts), PROGRAM, "/dev/null"]):
        # If a path outside is closed to others, bubblewrap would close it in the sandbox too.
        arguments += ["--perms", "0755", "--dir", directory]
    for source, path in mounts:
        arguments += ["--ro-bind-try" if source in installation.files else "--ro-bind", source, path]
    for path, target in installation.links:
        arguments += ["--symlink", target, path]
    arguments += ["--proc", "/proc"]
    # The namespace's init may have the program's id, has no limits, and its memory could be written.
    arguments += ["--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    for device in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for name, target in _DEVICE_LINKS:
        arguments += ["--symlink", target, f"/dev/{name}"]
    arguments += ["--perms", "0444", "--file", str(program), PROGRAM]
    arguments += ["--perms", "0755", "--dir", SCRATCH, "--remount-ro", "/"]
    return [*arguments, "--perms", "1777", "--size", str(limits.scratch_mib * MIB), "--tmpfs", SCRATCH,
            "--chdir", SCRATCH]  # fmt: skip


def _ancestors(paths: Sequence[str]) -> list[str]:
    """Return the directories above the paths, outer ones first, without the root directory."""
    found: dict[str, None] = {}
    for path in paths:
        parents = []
        while (path := os.path.dirname(path)) != "/":
            parents.append(path)
        found.update(dict.fromkeys(reversed(parents)))
    return list(found)


def _environment(packages: Packages) -> list[str]:
    variables: Mapping[str, str] = {
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "PATH": "/usr/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # so that a repeated call gives the same answer
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if packages.search:
        variables = {**variables, "PYTHONPATH": ":".join(packages.search)}
    return [part for name, value in variables.items() for part in ("--setenv", name, value)]


def _drop_root(programs: Programs, root_as: int | None) -> list[str]:
    if root_as is None:
        return []
    ids = ["--reuid", str(root_as), "--regid", str(root_as), "--clear-groups"]
    return [programs.setpriv, *ids, "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]


def _limits(limits: Limits) -> list[str]:
    """Return the options of prlimit; lower limits of this process stay."""
    wanted = {
        "as": (resource.RLIMIT_AS, limits.memory_mib * MIB, 0),
        "cpu": (resource.RLIMIT_CPU, limits.cpu_s, 1),  # a second later the kernel kills
        "nproc": (resource.RLIMIT_NPROC, limits.processes, 0),
        "fsize": (resource.RLIMIT_FSIZE, limits.scratch_mib * MIB, 0),
        "nofile": (resource.RLIMIT_NOFILE, limits.files, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 0, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0, 0),
        "stack": (resource.RLIMIT_STACK, 8 * MIB, 0),
        "core": (resource.RLIMIT_CORE, 0, 0),
    }
    options = []
    for name, (kind, soft, more) in wanted.items():
        hard = resource.getrlimit(kind)[1]
        most = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        options.append(f"--{name}={min(soft, most)}:{most}")
    return options
