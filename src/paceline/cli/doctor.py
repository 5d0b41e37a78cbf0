"""`paceline doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

import paceline
from paceline.cli.console import out, print_json
from paceline.cli.installed import integrations

__all__ = ["Check", "doctor", "examine"]

_NODES = Path("/sys/devices/system/node")
_START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor's: `remedy` says what to do, and is empty if there is nothing to do."""

    name: str
    works: bool
    finding: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="A list of JSON objects.")] = False) -> None:
    """Check this machine: cores, memory, versions, atomic operations, starting workers, packages to work with.

    Exits with 1 if something that Paceline needs does not work. Example: paceline doctor
    """
    from rich.text import Text

    checks = examine()
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        console = out()
        for check in checks:
            mark = ("works", "green") if check.works else ("fails", "bold red")
            remedy = f" {check.remedy}" if check.remedy else ""
            console.print(Text.assemble(mark, "  ", (check.name, "bold"), f": {check.finding}{remedy}"), soft_wrap=True)
    if not all(check.works for check in checks):
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Runs every check, in order; a check that raises is a finding."""
    examinations: dict[str, Callable[[], Check]] = {
        "cores": _cores,
        "NUMA nodes": _nodes,
        "memory": _memory,
        "python": _python,
        "torch": _torch,
        "numba": _numba,
        "paceline": lambda: Check("paceline", True, f"{paceline.__version__}."),
        "shared memory": _shared_memory,
        "atomic operations": _atomics,
        "sparse kernels": _sparse_kernels,
        "starting workers": _fork_server,
        "CUDA": _cuda,
    }
    examinations |= {
        name: partial(Check, name, True, *found) for name, found in integrations().items()
    }  # missing ones are not a failure
    return [_safely(name, examination) for name, examination in examinations.items()]


def _safely(name: str, examination: Callable[[], Check]) -> Check:
    try:
        return examination()
    except Exception as error:
        finding = f"{type(error).__name__}: {error}."
        return Check(name, False, finding, "Reinstall Paceline; if that changes nothing, report this line.")


def _cores() -> Check:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    remedy = "" if usable > 1 else "More workers than cores only take turns; give this process more cores."
    allowed = f" of {total}, the others are not given to this process" if usable < total else ""
    quota = _quota_cores()
    limited = f"; a quota allows the time of {quota:g}" if quota is not None and quota < usable else ""
    return Check("cores", True, f"{usable}{allowed}{limited}.", remedy)


def _quota_cores() -> float | None:
    """A container's CPU limit in cores, if there is one."""
    path = Path("/sys/fs/cgroup/cpu.max")
    words = path.read_text().split() if path.is_file() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _nodes() -> Check:
    nodes = sorted(int(path.name[4:]) for path in _NODES.glob("node[0-9]*"))
    if len(nodes) > 1:
        return Check("NUMA nodes", True, f"{len(nodes)}; --placement decides where the parameters lie.")
    found = "1" if nodes else "none named by the system, so treated as 1"
    return Check("NUMA nodes", True, f"{found}; --placement changes nothing here.")


def _memory() -> Check:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    if "MemAvailable" in kib:
        available, total = kib["MemAvailable"] / 2**20, kib["MemTotal"] / 2**20
        remedy = "Close something, or use fewer workers." if available < 1 else ""
        return Check("memory", True, f"{available:.1f} GiB available of {total:.1f} GiB.", remedy)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Check("memory", True, f"{total:.1f} GiB in all.")


def _python() -> Check:
    version = platform.python_version()
    supported = platform.python_version_tuple()[:2] in (("3", "11"), ("3", "12"), ("3", "13"))
    finding = f"{version} on {platform.system()} {platform.machine()}."
    if platform.system() != "Linux":
        return Check("python", False, finding, "Shared-memory training needs Linux.")
    return Check("python", supported, finding, "" if supported else "Install Python 3.11, 3.12 or 3.13.")


def _torch() -> Check:
    import torch

    return Check("torch", True, f"{torch.__version__}.")


def _numba() -> Check:
    import numba

    return Check("numba", True, f"{numba.__version__}, llvmlite {metadata.version('llvmlite')}.")


def _shared_memory() -> Check:
    if not hasattr(os, "memfd_create"):
        return Check("shared memory", False, "The system has no memfd_create.", "Use Linux 3.17 or newer.")
    descriptor = os.memfd_create("paceline-doctor")
    try:
        os.ftruncate(descriptor, 2**20)
    finally:
        os.close(descriptor)
    return Check("shared memory", True, "Anonymous files can be made; nothing is left behind in /dev/shm.")


def _atomics() -> Check:
    import numpy as np

    from paceline.memory import atomics

    word = np.zeros(1, dtype=np.int64)
    address = word.ctypes.data
    before = atomics.fetch_add(address, 5)
    swapped, refused = atomics.compare_and_swap(address, 5, 7), atomics.compare_and_swap(address, 5, 9)
    if (before, bool(swapped), bool(refused), atomics.load(address)) != (0, True, False, 7):
        return Check("atomic operations", False, "They gave wrong results.", "Report this with your processor's name.")
    return Check("atomic operations", True, "Compare-and-swap and fetch-and-add are compiled and right.")


def _sparse_kernels() -> Check:
    import numpy as np
    from scipy import sparse

    from paceline.sklearn import HogwildClassifier

    started_s = time.monotonic()
    for kind in (np.float32, np.float64):
        for classes in (2, 3):
            labels = np.arange(100_000) % classes  # enough for two threads, which have their own kernels
            model = HogwildClassifier(max_iter=5, tol=None, n_jobs=2, random_state=0)
            X = sparse.csr_matrix(np.eye(classes, dtype=kind))
            if model.fit(X[labels], labels).score(X, np.arange(classes)) != 1.0:
                return Check(
                    "sparse kernels", False, "They gave wrong results.", "Report this with your processor's name."
                )
    took_s = time.monotonic() - started_s
    return Check(
        "sparse kernels", True, f"Compiled, or loaded from Numba's cache, in {took_s:.1f} s; cached from now on."
    )


def _fork_server() -> Check:
    context = multiprocessing.get_context("forkserver")
    started_s = time.monotonic()
    process = context.Process(target=os.getpid, daemon=True)
    process.start()
    process.join(_START_LIMIT_S)
    took_s = time.monotonic() - started_s
    if process.exitcode is None:
        process.kill()
        why = f"A process did not start within {_START_LIMIT_S:.0f} s."
        return Check(
            "starting workers", False, why, "Look for a limit on processes (ulimit -u), or use --backend threads."
        )
    if process.exitcode != 0:
        why = f"A process ended with code {process.exitcode}."
        return Check("starting workers", False, why, "Use --backend threads, and report this line.")
    return Check("starting workers", True, f"The fork server started and ended a process in {took_s:.1f} s.")


def _cuda() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check(
            "CUDA",
            True,
            f"{torch.cuda.device_count()} device(s), for loops of your own; shared-memory training uses the CPU.",
        )
    return Check("CUDA", True, "Not present, and not needed: shared-memory training uses the CPU.")
