"""Hosts on this machine whose links have a rate: network namespaces around a bridge, shaped by tc's token bucket filter."""

from __future__ import annotations

import os
import subprocess
from typing import Self

WIRE = "wire"  # what every host's end of its link is called
BURST = "128kb"  # two of the largest packets that the kernel hands to a link at once
QUEUE_MS = 200


class Network:
    """Hosts with one link each to a bridge; it and they are removed on leaving. Needs root, `ip` and `tc`.

    Args:
        num_hosts: how many.
        rate_mbit: of each link and direction; None: as fast as the kernel copies.
    """

    def __init__(self, num_hosts: int, rate_mbit: float | None = None) -> None:
        self.num_hosts, self.rate_mbit = num_hosts, rate_mbit
        self._bridge = f"links-{os.getpid()}-bridge"

    def name(self, host: int) -> str:
        """A host's namespace."""
        return f"links-{os.getpid()}-{host}"

    @staticmethod
    def address(host: int) -> str:
        """Where the others reach a host."""
        return f"10.231.78.{host + 1}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.name, range(self.num_hosts)), self._bridge):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def command(self, host: int, command: list[str]) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def sent_bytes(self, host: int) -> int:
        """All that a host has sent so far, as its interface counts: payload, frames and headers, acknowledgements."""
        path = f"/sys/class/net/{WIRE}/statistics/tx_bytes"
        return int(_output(self.command(host, ["cat", path])))

    def _make(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            name, port = self.name(host), f"port{host}"
            _run("ip", "netns", "add", name)
            _run(*f"ip link add {WIRE} netns {name} type veth peer name {port} netns {self._bridge}".split())
            _run(*f"ip -n {self._bridge} link set {port} master bridge up".split())
            _run(*f"ip -n {name} address add {self.address(host)}/24 dev {WIRE}".split())
            for link in (WIRE, "lo"):
                _run(*f"ip -n {name} link set {link} up".split())
            if self.rate_mbit is not None:
                shape = f"root tbf rate {self.rate_mbit}mbit burst {BURST} latency {QUEUE_MS}ms".split()
                _run("tc", "-n", name, "qdisc", "add", "dev", WIRE, *shape)
                _run("tc", "-n", self._bridge, "qdisc", "add", "dev", port, *shape)


def _run(*words: str) -> None:
    _output(list(words))


def _output(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
