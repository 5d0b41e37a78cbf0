"""Places memory and workers on a machine with several memory nodes (NUMA).

A policy holds for pages that are not touched yet: set it right after the segment is created. The kernel keeps it with
the shared memory itself, so it also holds for pages that another process touches first. Without a policy, each page
goes to the node of the worker that writes it first.

The placing functions return a sentence on what they did. A kernel or container that forbids placement causes no error,
since the run is then slower but still correct.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.memory.segment import PAGE_BYTES

_NODES = Path("/sys/devices/system/node")
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}.get(platform.machine())
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Node:
    """One memory node: its nearby CPUs and its size."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


def numa_nodes(root: Path = _NODES) -> list[Node]:
    """The machine's memory nodes in the order of their ids; one node with all CPUs if the system names none."""
    nodes = [_read_node(folder) for folder in root.glob("node[0-9]*")]
    if not nodes:
        return [Node(0, tuple(range(os.cpu_count() or 1)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    return sorted(nodes, key=lambda node: node.id)


def interleave(address: int, size_bytes: int) -> str:
    """Spreads the pages over all nodes in turn: equal bandwidth for all workers, for vectors that all read."""
    nodes = [node.id for node in numa_nodes() if node.memory_bytes]
    return _mbind(address, size_bytes, _MPOL_INTERLEAVE, nodes, "interleaved over")


def bind(address: int, size_bytes: int, nodes: Iterable[int]) -> str:
    """Puts the pages on these nodes only, which must exist, for vectors that one worker uses most."""
    wanted = sorted(set(nodes))
    known = [node.id for node in numa_nodes()]
    if not wanted or not set(wanted) <= set(known):
        raise ValueError(f"cannot bind memory to nodes {wanted}: this machine has the nodes {known}")
    return _mbind(address, size_bytes, _MPOL_BIND, wanted, "bound to")


def pin(worker_id: int, num_workers: int, cpus: Sequence[int]) -> tuple[int, ...]:
    """Keeps this process on its share of the CPUs and returns that share.

    With enough CPUs each worker gets a contiguous part (neighbours share caches); otherwise CPUs are assigned round robin.
    """
    if len(cpus) >= num_workers:
        first = len(cpus) * worker_id // num_workers
        share = tuple(cpus[first : len(cpus) * (worker_id + 1) // num_workers])
    else:
        share = (cpus[worker_id % len(cpus)],)
    os.sched_setaffinity(0, share)
    return share


def _mbind(address: int, size_bytes: int, policy: int, nodes: list[int], verb: str) -> str:
    what = f"{size_bytes} bytes {verb} node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    if _SYS_MBIND is None:
        return f"Not placed: {what} needs Linux's mbind, which this system does not have."
    mask = (ctypes.c_ulong * (_MAX_NODES // _BITS))()
    for node in nodes:
        mask[node // _BITS] |= 1 << (node % _BITS)
    start = address // PAGE_BYTES * PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(_SYS_MBIND),
        ctypes.c_void_p(start),
        ctypes.c_ulong(address + size_bytes - start),
        ctypes.c_int(policy),
        mask,
        ctypes.c_ulong(_MAX_NODES + 1),  # the kernel takes one bit less than it is told
        ctypes.c_uint(0),
    )
    if result != 0:
        return f"Not placed: {what} was refused by the kernel ({os.strerror(ctypes.get_errno())})."
    return f"Placed: {what}."


def _read_node(folder: Path) -> Node:
    # meminfo's first line reads `Node 0 MemTotal:       32796284 kB`
    total = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    memory_bytes = int(total[1]) * 1024 if total else 0
    return Node(int(folder.name.removeprefix("node")), _parse_cpus((folder / "cpulist").read_text()), memory_bytes)


def _parse_cpus(text: str) -> tuple[int, ...]:
    """Reads the kernel's list format.

    >>> _parse_cpus("0-2,8")
    (0, 1, 2, 8)
    """
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)
