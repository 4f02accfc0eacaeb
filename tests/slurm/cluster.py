"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, with a configuration of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
# The second keeps a requeued job waiting for as long as its old credential lives: 2 minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=15
ReturnToService=2
KillWait=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_node_port}-{last_node_port}] CPUs=2 \
RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "Slurm's daemons have to be started by root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge (make test-slurm does)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        return "mount namespaces are not permitted: the nodes' names could not be resolved"
    return None


class Cluster:
    """Two nodes, n1 and n2. Used as a context; on leaving it nothing that it started is left.

    Partition `main` is preempted by `urgent`: SIGTERM, 300 s of grace, requeue.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            for node in ("n1", "n2"):
                (self.folder / f"spool.{node}").mkdir()
            self._start(
                "munged", "--foreground", "--force", *self._munge("socket", "key-file", "pid-file", "log-file"),
                *self._munge("seed-file"),
            )  # fmt: skip
            self.wait_until((self.folder / "munge.socket").exists, "munged opens its socket")
            self._start("slurmctld", "-D", "-c")
            for node in ("n1", "n2"):
                self.start_node(node)
            self.wait_until(self.is_idle, "both nodes are idle", timeout=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons = {}

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
        return result.stdout.strip()

    def submit(self, *command: str, environment: Mapping[str, str] | None = None) -> Job:
        """`sbatch` with these arguments."""
        output = subprocess.run(
            ["sbatch", "--parsable", *command],
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert output.returncode == 0, output.stderr
        return Job(self, output.stdout.strip())

    def is_idle(self) -> bool:
        result = subprocess.run(
            ["sinfo", "--noheader", "--partition=main", "--format=%T %D"],
            env=self.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return result.stdout.split() == ["idle", "2"]

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Kill all processes of the node at once, as when its power fails."""
        victims = [process for process in self.processes() if _variable(process, "SLURMD_NODENAME") == node]
        victims += [p for p in self.processes() if p.name() == "slurmstepd" and _is_below(p, self._daemons[node].pid)]
        daemon = psutil.Process(self._daemons[node].pid)
        for process in [*daemon.children(recursive=True), daemon, *victims]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._daemons.pop(node).wait()

    def processes(self) -> list[psutil.Process]:
        """All processes with this cluster's configuration in their environment: daemons and jobs."""
        configuration = self.environment["SLURM_CONF"]
        return [process for process in psutil.process_iter() if _variable(process, "SLURM_CONF") == configuration]

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 180.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}\n{self._logs()}"
            time.sleep(0.2)

    def _configure(self) -> None:
        controller_port, first_node_port = _free_ports(1)[0], _free_ports(2)[0]
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                folder=self.folder,
                controller_port=controller_port,
                first_node_port=first_node_port,
                last_node_port=first_node_port + 1,
            )
        )
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1\n127.0.0.1 n2\n")
        key = self.folder / "munge.key-file"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _munge(self, *names: str) -> list[str]:
        return [f"--{name}={self.folder}/munge.{name}" for name in names]

    def _start(self, *command: str, name: str | None = None) -> None:
        """Start a daemon in a mount namespace whose /etc/hosts knows the nodes' names."""
        script = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        with open(self.folder / f"{name or command[0]}.out", "ab") as output:
            self._daemons[name or command[0]] = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script, "sh", *command],
                env=self.environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _logs(self) -> str:
        tails = [f"--- {file.name}\n{file.read_text(errors='replace')[-600:]}" for file in self.folder.glob("*.log")]
        return "\n".join(tails)


class Job:
    """One job of a `Cluster`."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self._cluster = cluster
        self.number = number

    @property
    def fields(self) -> dict[str, str]:
        """The fields that `scontrol show job` prints of the job."""
        words = self._cluster.run("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    def wait_for(self, *states: str, timeout: float = 240.0) -> str:
        self._cluster.wait_until(
            lambda: self.state in states, f"job {self.number} is {' or '.join(states)}", timeout=timeout
        )
        return self.state


def _variable(process: psutil.Process, name: str) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None


def _is_below(process: psutil.Process, ancestor: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return ancestor in (parent.pid for parent in process.parents())
    return False


def _free_ports(count: int) -> Iterable[int]:
    """Find consecutive free ports."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for number in range(port, port + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", number))
        except OSError:
            continue
        return list(range(port, port + count))
