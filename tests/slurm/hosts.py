"""Two hosts on one machine: network namespaces with an address and a name each, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

INTERFACE = "cable"


def missing(*qdiscs: str) -> str | None:
    """Why such hosts, with these disciplines of `tc` on their cable, cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"{program} not found: apt-get install iproute2 util-linux (make test-slurm does)"
    probe = f"zbprobe{os.getpid()}"
    try:
        if _try("ip", "netns", "add", probe) is not None:
            return "network namespaces are not permitted"
        if _in(probe, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", "other") is not None:
            return "the kernel has no veth"
        for qdisc in qdiscs:
            problem = _in(probe, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *qdisc.split())
            if problem is not None:
                return f"tc qdisc {qdisc.split()[0]}: {problem}"
    finally:
        _try("ip", "netns", "del", probe)
    return None


def _try(*command: str) -> str | None:
    """Run a command; return its complaint if it fails, else None."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else (result.stderr.strip() or f"status {result.returncode}")


def _in(namespace: str, *command: str) -> str | None:
    return _try("ip", "netns", "exec", namespace, *command)


def _do(*command: str) -> None:
    problem = _try(*command)
    assert problem is None, f"{' '.join(command)}: {problem}"


class Host:
    """One of the two hosts, at its end of the cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._etc = Path("/etc/netns") / name

    def add(self, all_hosts: Mapping[str, str]) -> None:
        # `ip netns exec` shows these files in place of those in /etc.
        self._etc.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in all_hosts.items())]
        (self._etc / "hosts").write_text("\n".join(lines) + "\n")
        _do("ip", "netns", "add", self.name)
        self.do("ip", "link", "set", "lo", "up")

    def do(self, *command: str) -> None:
        _do("ip", "netns", "exec", self.name, *command)

    def start(self, command: list[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on this host, under the host's name."""
        script = f'hostname {self.name} && exec "$@"'
        with open(output, "wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", script, "sh", *command],
                env={**environment, "GLOO_SOCKET_IFNAME": INTERFACE},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def remove(self) -> None:
        """Remove the host, and kill what still runs there."""
        running = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for process in running.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _try("ip", "netns", "del", self.name)
        shutil.rmtree(self._etc, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._etc.parent.rmdir()


class TwoHosts:
    """Two hosts joined by a cable, for the time of a `with` block.

    Args:
        qdisc: what `tc` puts on both ends of the cable, `tbf rate 40mbit burst 16kb latency 1s` for example.
    """

    def __init__(self, qdisc: str) -> None:
        self._qdisc = qdisc
        # The kernel takes 15 characters, and other runs of the tests may have hosts too.
        self.hosts = [Host(f"zb{end}{os.getpid()}", f"10.77.0.{number}") for number, end in ((1, "a"), (2, "b"))]

    def __enter__(self) -> TwoHosts:
        try:
            names = {host.name: host.address for host in self.hosts}
            for host in self.hosts:
                host.add(names)
            here, there = (host.name for host in self.hosts)
            cable = ("type", "veth", "peer", "name", INTERFACE, "netns", there)
            _do("ip", "link", "add", INTERFACE, "netns", here, *cable)
            for host in self.hosts:
                host.do("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
                host.do("ip", "link", "set", INTERFACE, "up")
                host.do("tc", "qdisc", "replace", "dev", INTERFACE, "root", *self._qdisc.split())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for host in self.hosts:
            host.remove()
