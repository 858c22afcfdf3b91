"""A real SLURM of six virtual nodes on this machine: munged, slurmctld and six slurmd in a directory of their own.

Needs root and Debian's slurm-wlm and munge (tools/cluster_tools.sh). Nothing is installed as a service; `close`
ends exactly what `open` started.
"""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from megarl.cluster.pool.ray_head import ReservedPorts
from tests.support.checkout import ROOT, environment
from tests.support.pool.leftovers import marked

SLURM_CONF = """\
ClusterName=megarl-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again.
AuthInfo=socket={directory}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
MessageTimeout=60
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
{nodes}
PartitionName=all Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """`open` ... `close`; `run("squeue", ...)` calls a client of this very cluster."""

    def __init__(self, directory: Path, count: int = 6) -> None:
        self.directory, self.count = directory, count
        self.conf = directory / "slurm.conf"
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def open(self, timeout_s: float = 60.0) -> None:
        """Wait until all nodes are idle."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir()
        self._reserved = ReservedPorts(1 + self.count)
        controller, *ports = self._reserved.ports
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for i, port in enumerate(ports, start=1)
        )
        self.conf.write_text(
            SLURM_CONF.format(
                host=platform.node(),
                directory=self.directory,
                controller_port=controller,
                nodes=nodes,
                count=self.count,
            )
        )
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for i in range(1, self.count + 1):
            (self.directory / f"spool-n{i}").mkdir()
            self._start(f"slurmd-n{i}", "slurmd", "-D", "-N", f"n{i}", "-f", str(self.conf))
        deadline = time.monotonic() + timeout_s
        while (states := self._states()) != ["idle"] * self.count:
            assert time.monotonic() < deadline, f"SLURM did not come up: {states}; see {self.directory}"
            time.sleep(0.5)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """stdout of a SLURM client; its stderr in the AssertionError if it fails. `srun` ends with its job."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """`RUNNING`, `COMPLETED`, ...; the state of a job that has just ended is still known for minutes."""
        for line in self.run("scontrol", "show", "job", job).split():
            if line.startswith("JobState="):
                return line.removeprefix("JobState=")
        return ""

    def nodes_of(self, job: str) -> list[str]:
        """The nodes of a job that runs, in the order of its ranks."""
        [nodes] = re.findall(r"^ *NodeList=(\S+)", self.run("scontrol", "show", "job", job), re.MULTILINE)
        return self.run("scontrol", "show", "hostnames", nodes).split()

    def wait(self, job: str, states: set[str], timeout_s: float, log: Path | None = None) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            said = log.read_text()[-4000:] if log is not None and log.exists() else ""
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout_s:.0f} s, not {states}:\n{said}"
            time.sleep(0.5)
        return state

    def close(self) -> None:
        """Jobs first: their steps would go on without the daemons."""
        for job in self._query("squeue", "--noheader", "--format", "%i"):
            self.run("scancel", job, check=False)
        deadline = time.monotonic() + 60
        while self._query("squeue", "--noheader", "--format", "%i") and time.monotonic() < deadline:
            time.sleep(0.5)
        for _, daemon in reversed(self._daemons):
            daemon.terminate()
        for name, daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=60)
                print(f"{name} had to be killed")
        self._reserved.close()

    def _states(self) -> list[str]:
        return self._query("sinfo", "--noheader", "--Node", "--format", "%T")

    def _query(self, *command: str) -> list[str]:
        """Words of its output; none while the cluster is not up."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        return done.stdout.split()

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = ("socket", "log", "pid", "seed")
        socket_file, log, pid, seed = (self.directory / f"munge.{name}" for name in names)
        self._start(
            "munged", "munged", "--foreground", "--force", f"--socket={socket_file}", f"--key-file={key}",
            f"--log-file={log}", f"--pid-file={pid}", f"--seed-file={seed}",
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while not socket_file.exists():
            assert time.monotonic() < deadline, f"munged did not come up; see {log}"
            time.sleep(0.1)

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        self._daemons.append((name, process))


def submit(slurm: Slurm, config: Path, *options: str) -> tuple[str, Path]:
    """Job id and log of the script that `megarl launch --dry-run` shows for `config`."""
    command = [sys.executable, "-m", "megarl", "launch", "--config", str(config), "--scheduler", "slurm"]
    done = subprocess.run(
        [*command, "--dry-run", "--device", "cpu"], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "memory, trainer" in done.stderr, done.stderr
    script, log = config.with_name("job.sbatch"), config.with_name("job.log")
    script.write_text(done.stdout)
    job = slurm.run("sbatch", "--parsable", f"--output={log}", *options, str(script), cwd=ROOT,
                    **marked(config.parent / "run"))  # fmt: skip
    return job, log
