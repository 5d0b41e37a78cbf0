"""Hosts on this machine whose links have a rate: network namespaces around a bridge, shaped by tc's token bucket filter."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Self

WIRE = "wire"  # what every host's end of its link is called
BURST = "128kb"  # two of the largest packets that the kernel hands to a link at once
QUEUE_MS = 200


class Network:
    """Hosts with one link each to a bridge; it and they are removed on leaving. Needs root, `ip` and `tc`.

    Args:
        num_hosts: how many.
        rate_mbit: of each link and direction; None: as fast as the kernel copies.
        burst: bytes that an idle link carries at once, without that rate.
    """

    def __init__(self, num_hosts: int, rate_mbit: float | None = None, burst: str | None = None) -> None:
        self.num_hosts, self.rate_mbit, self._burst = num_hosts, rate_mbit, burst
        self._prefix = f"links-{os.getpid()}"
        self._bridge = f"{self._prefix}-bridge"

    def name(self, host: int) -> str:
        """A host's namespace."""
        return f"{self._prefix}-{host}"

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

    def enter(self, host: int) -> None:
        """Moves this process to a host; it must have one thread."""
        with Path(f"/run/netns/{self.name(host)}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"{self.name(host)} cannot be entered")

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
                shape = f"root tbf rate {self.rate_mbit}mbit burst {self._burst or BURST} latency {QUEUE_MS}ms".split()
                _run("tc", "-n", name, "qdisc", "add", "dev", WIRE, *shape)
                _run("tc", "-n", self._bridge, "qdisc", "add", "dev", port, *shape)


def _run(*words: str) -> None:
    _output(list(words))


def _output(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
