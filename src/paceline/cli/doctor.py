"""`paceline doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

import paceline
from paceline.cli.console import out, print_json
from paceline.cli.installed import integrations
from paceline.errors import UsageError
from paceline.specs.bounds import available_bytes
from paceline.system import limits

_NODES = Path("/sys/devices/system/node")
_START_LIMIT_S = 60.0
_SMALL_BYTES = 1.5 * 2**30
_BATCHES, _SMALL_SHARED_BYTES = Path("/dev/shm"), 2**30
_WRONG = "They gave wrong results.", "Report this with your processor's name."


@dataclass(frozen=True)
class Check:
    """One line of the doctor's: `remedy` says what to do, and is empty if there is nothing to do."""

    name: str
    works: bool
    finding: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False) -> None:
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
            console.print(Text.assemble(mark, "  ", (check.name, "bold"), f": {check.finding}{remedy}"))
    if not all(check.works for check in checks):
        raise typer.Exit(1)


class _FailsError(Exception):
    """Something does not work: the finding and the remedy."""


_Found = str | tuple[str, str]  # a finding, or a finding and what could be better


def examine() -> list[Check]:
    """Runs every check, in order; a check that raises is a finding."""
    examinations: dict[str, Callable[[], _Found]] = {
        "cores": _cores,
        "NUMA nodes": _nodes,
        "memory": _memory,
        "python": _python,
        "torch": lambda: f"{importlib.import_module('torch').__version__}.",
        "numba": lambda: f"{importlib.import_module('numba').__version__}, llvmlite {metadata.version('llvmlite')}.",
        "paceline": lambda: f"{paceline.__version__}.",
        "shared memory": _shared_memory,
        "loader processes": _loader_processes,
        "temporary files": lambda: f"In {limits.temporary_folder()}.",
        "atomic operations": _atomics,
        "sparse kernels": _sparse_kernels,
        "starting workers": _fork_server,
        "CUDA": _cuda,
    }
    checks = [_checked(name, examination) for name, examination in examinations.items()]
    return checks + [Check(name, True, *found) for name, found in integrations().items()]  # a missing one is no failure


def _checked(name: str, examination: Callable[[], _Found]) -> Check:
    try:
        found = examination()
    except _FailsError as error:
        return Check(name, False, *error.args)
    except UsageError as error:
        return Check(name, False, str(error))
    except Exception as error:
        finding = f"{type(error).__name__}: {error}."
        return Check(name, False, finding, "Reinstall Paceline; if that changes nothing, report this line.")
    return Check(name, True, *([found] if isinstance(found, str) else found))


def _cores() -> _Found:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    remedy = "" if usable > 1 else "More workers than cores only take turns; give this process more cores."
    allowed = f" of {total}, the others are not given to this process" if usable < total else ""
    quota = limits.cpu_quota()
    limited = f"; a quota allows the time of {quota:g}" if quota is not None and quota < usable else ""
    return f"{usable}{allowed}{limited}.", remedy


def _nodes() -> _Found:
    number = len(list(_NODES.glob("node[0-9]*")))
    if number > 1:
        return f"{number}; --placement decides where the parameters lie."
    found = "1" if number else "none named by the system, so treated as 1"
    return f"{found}; --placement changes nothing here."


def _memory() -> _Found:
    system, limit = limits.system_memory(), limits.memory_limit()
    if "MemAvailable" not in system:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return f"{total:.1f} GiB in all."
    allowed = ""
    if limit is not None and limit < system["MemTotal"]:
        allowed = f" A container may use {limit / 2**30:.1f} GiB."
    is_small = available_bytes(by_this_process=False) < _SMALL_BYTES
    remedy = "Close something, or use fewer workers: two on a small model need 0.7 GiB." if is_small else ""
    available, total = (system[name] / 2**30 for name in ("MemAvailable", "MemTotal"))
    return f"{available:.1f} GiB available of {total:.1f} GiB.{allowed}", remedy


def _python() -> _Found:
    finding = f"{platform.python_version()} on {platform.system()} {platform.machine()}."
    if platform.system() != "Linux":
        raise _FailsError(finding, "Shared-memory training needs Linux.")
    if platform.python_version_tuple()[:2] not in (("3", "11"), ("3", "12"), ("3", "13")):
        raise _FailsError(finding, "Install Python 3.11, 3.12 or 3.13.")
    return finding


def _shared_memory() -> _Found:
    if not hasattr(os, "memfd_create"):
        raise _FailsError("The system has no memfd_create.", "Use Linux 3.17 or newer.")
    descriptor = os.memfd_create("paceline-doctor")
    try:
        os.ftruncate(descriptor, 2**20)
    finally:
        os.close(descriptor)
    return "Anonymous files can be made; nothing is left behind in /dev/shm."


def _loader_processes() -> _Found:
    size = shutil.disk_usage(_BATCHES).total if _BATCHES.is_dir() else 0
    finding = f"Their batches pass through {_BATCHES}, which has {size / 2**20:,.0f} MiB."
    remedy = (
        "A loader whose batches do not fit ends with a bus error: enlarge it, as with docker's --shm-size=1g, or use"
        " num_workers=0."
    )
    return finding, remedy if size < _SMALL_SHARED_BYTES else ""


def _atomics() -> _Found:
    import numpy as np

    from paceline.memory import atomics

    word = np.zeros(1, dtype=np.int64)
    address = word.ctypes.data
    before = atomics.fetch_add(address, 5)
    swapped, refused = atomics.compare_and_swap(address, 5, 7), atomics.compare_and_swap(address, 5, 9)
    if (before, bool(swapped), bool(refused), atomics.load(address)) != (0, True, False, 7):
        raise _FailsError(*_WRONG)
    return "Compare-and-swap and fetch-and-add are compiled and right."


def _sparse_kernels() -> _Found:
    import numpy as np
    from scipy import sparse

    from paceline.sklearn import HogwildClassifier
    from paceline.system.compilation import has_cache

    started_s = time.monotonic()
    for kind in (np.float32, np.float64):
        for classes in (2, 3):
            labels = np.arange(100_000) % classes  # enough for two threads, which have their own kernels
            model = HogwildClassifier(max_iter=5, tol=None, n_jobs=2, random_state=0)
            X = sparse.csr_matrix(np.eye(classes, dtype=kind))
            if model.fit(X[labels], labels).score(X, np.arange(classes)) != 1.0:
                raise _FailsError(*_WRONG)
    took_s = time.monotonic() - started_s
    if not has_cache():
        return f"Compiled in {took_s:.1f} s, and so by every process.", "Name a folder for them in NUMBA_CACHE_DIR."
    return f"Compiled, or loaded from Numba's cache, in {took_s:.1f} s; cached from now on."


def _fork_server() -> _Found:
    limits.temporary_folder()  # for its sockets
    context = multiprocessing.get_context("forkserver")
    started_s = time.monotonic()
    process = context.Process(target=os.getpid, daemon=True)
    process.start()
    process.join(_START_LIMIT_S)
    took_s = time.monotonic() - started_s
    if process.exitcode is None:
        process.kill()
        why = f"A process did not start within {_START_LIMIT_S:.0f} s."
        raise _FailsError(why, "Look for a limit on processes (ulimit -u), or use --backend threads.")
    if process.exitcode != 0:
        why = f"A process ended with code {process.exitcode}."
        raise _FailsError(why, "Use --backend threads, and report this line.")
    return f"The fork server started and ended a process in {took_s:.1f} s."


def _cuda() -> _Found:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} device(s), for loops of your own; paceline train uses the CPU."
    return "Not present, and not needed: paceline train uses the CPU."
