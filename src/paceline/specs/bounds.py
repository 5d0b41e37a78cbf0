"""Limits of a run's numbers: each with its reason and the sentence that refuses a number beyond it.

A `Bound` holds for a single number from any source: an option, a spec, a file, a Python call. `check_memory` and
`check_workers` check a run against the machine's limits before anything is made.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, shown


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A range of numbers.

    >>> Bound(least=1, most=10, why="there are no more").check("--fingers", 11)
    Traceback (most recent call last):
    ...
    paceline.errors.UsageError: --fingers must be at most 10, not 11: there are no more.
    """

    least: float = -math.inf  # the smallest
    most: float = math.inf  # the largest
    why: str = ""  # the reason for `most`, if it is not obvious, as the end of a sentence
    whole: bool = False  # whether only whole numbers are allowed
    above: bool = False  # whether `least` itself is outside
    below: bool = False  # whether `most` itself is outside

    def check(self, name: str, value: object) -> None:
        """Refuses a value that is not such a number."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            raise UsageError(f"{name} must be {'a whole number' if self.whole else 'a number'}, not {shown(value)}.")
        number: Any = value if self.whole else as_float(value)
        # Infinity is never inside, and NaN is neither above nor below.
        is_low = not (number > self.least if self.above or self.least == -math.inf else number >= self.least)
        is_high = not (number < self.most if self.below or self.most == math.inf else number <= self.most)
        if self.why and is_high and not is_low:
            raise UsageError(f"{name} must be at most {_text(self.most)}, not {shown(value)}: {self.why}.")
        if is_low or is_high:
            raise UsageError(f"{name} must be {self._in_words()}, not {shown(value)}.")

    def _in_words(self) -> str:
        number = "" if self.whole else "a number "
        if self.least == -math.inf:
            return number.rstrip()
        if self.why or self.most == math.inf:
            return f"{number}above {_text(self.least)}" if self.above else f"{_text(self.least)} or more"
        ends = "above {} and below {}" if self.above and self.below else "above {} and up to {}"
        ends = ends if self.above else ("from {} to below {}" if self.below else "from {} to {}")
        return ends.format(_text(self.least), _text(self.most))


# Numbers of a run

_EXACT = "beyond it, tables and JSON cannot tell one number from the next"
SEED = Bound(least=0, most=2**63 - 1, whole=True, why="generators take 63 bits")
SPARSE_SEED = Bound(least=0, most=2**32 - 1, whole=True, why="NumPy's generators of scikit-learn take 32 bits")
COUNT = Bound(least=1, most=10**15, whole=True, why=_EXACT)
COUNT_FROM_0 = Bound(least=0, most=10**15, whole=True, why=_EXACT)
EPOCHS = Bound(least=0, above=True, most=1e9, why="batches are numbered in 64 bits, and an epoch may have a billion")
BATCH_SIZE = Bound(least=1, most=2**31 - 1, whole=True, why="no memory holds more samples at once")
PARAMETERS = Bound(least=1, most=10**12, whole=True, why="the bytes that are sent are counted in 64 bits")
ACCURACY = Bound(least=0, above=True, most=1, why="it is a fraction; write 0.95 for 95 %")
NUMBER = Bound()
ABOVE_0 = Bound(least=0, above=True)
FROM_0 = Bound(least=0)
FRACTION = Bound(least=0, above=True, most=1)
SHARE = Bound(least=0, most=1)
DECAY = Bound(least=0, most=1, below=True)
BITS = Bound(least=2, most=8, whole=True)
BUCKET = Bound(least=8, most=2**31, whole=True)
RANK = Bound(least=1, most=1024, whole=True, why="beyond it, the factors are as large as their matrix")
BETWEEN_0_AND_1 = Bound(least=0, above=True, most=1, below=True)

# How many take part, how often, and how much

SIMULATED_WORKERS = Bound(least=1, most=10**7, whole=True, why="a simulated worker takes 14 kB of memory or more")
SERVERS = Bound(least=1, most=2**15 - 2, whole=True, why="words of shared memory name their owners in 15 bits")
PLANNED_WORKERS = Bound(least=1, most=100_000, whole=True, why="what is planned for more takes hours to compute")
BACKUPS = Bound(least=0, most=1000, whole=True, why="each is a row of a table")
PROCESSORS = Bound(least=1, most=8192, whole=True, why="Linux counts no more processors")
RUNS = Bound(least=1, most=10_000, whole=True, why="one table shows them all; a study may have 100,000 trials")
TRIALS = Bound(least=1, most=100_000, whole=True, why="one folder holds them all; try fewer seeds or levels")
LEVELS = Bound(least=1, most=10_000, whole=True)
COMBINATIONS = Bound(least=1, most=10**6, why="each is looked at; try fewer levels, or a random design")
RANGE = Bound(least=-1e300, most=1e300)
BLOCKS = Bound(least=1, most=10**6, whole=True, why="each block of each update is simulated by itself")
UPDATE_VECTORS = Bound(least=0, above=True, most=1e6, why="an update reads and writes a few")
PASSES = Bound(least=1, most=10**9, whole=True, why="a pass takes microseconds at least")

# Times and speeds: with these, sums and products of them stay finite

SECONDS = Bound(least=0, most=1e9, why="that is 30 years")
SECONDS_ABOVE_0 = Bound(least=0, above=True, most=1e9, why="that is 30 years")
DEADLINE_S = Bound(least=1, most=10**6, whole=True, why="that is 11 days, and sockets count milliseconds in 32 bits")
FACTOR = Bound(least=0, above=True, most=1e9, why="a slower worker makes no progress")
FACTOR_FROM_1 = Bound(least=1, most=1e9, why="a slower worker makes no progress")
UPDATE_TIMES = Bound(least=0, most=1e6, why="a worker that waits for a million updates waits for ever")
BYTES_PER_S = Bound(least=1e-3, most=1e18, why="no memory or link is as fast")
FLOPS_PER_S = Bound(least=1, most=1e21, why="no machine is as fast")
DEATHS_PER_S = Bound(least=0, most=1000, why="workers that die more often never train")
BYTES = Bound(least=0, most=1e18, why="no memory is as large")

_RUN: Mapping[str, Bound] = {
    "workers": COUNT,
    "steps": COUNT,
    "epochs": EPOCHS,
    "batch_size": BATCH_SIZE,
    "learning_rate": ABOVE_0,
    "momentum": DECAY,
    "seed": SEED,
    "restarts": COUNT_FROM_0,
    "min_workers": COUNT,
    "intra_op_threads": PROCESSORS,
    "staleness_ramp_epochs": EPOCHS,
    "checkpoint_every_s": SECONDS,
    "target_loss": NUMBER,
    "target_accuracy": ACCURACY,
    "target_fraction": BETWEEN_0_AND_1,
    "limit_s": SECONDS_ABOVE_0,
    "limit_samples": COUNT,
    "evaluate_every_samples": COUNT,
}


def check_run(given: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
    """Raises `UsageError` for the first number that no run can have.

    `given` are numbers by the names of `TrainConfig` and `launch`; None and other names are ignored. `name_of` gives a
    number's name in messages.
    """
    for name, bound in _RUN.items():
        if given.get(name) is not None:
            bound.check(name_of(name), given[name])


# What a machine can hold

_CONTROL_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_PROCESS_BYTES = 40 * 10**6  # a worker forked from the fork server: 35 MB without a mailbox, 54 MB with one
_PROGRAM_BYTES = 200 * 10**6  # a worker that imports PyTorch for itself
_THREAD_BYTES = 1_200_000
_SIMULATED_BYTES = 14_000
_DESCRIPTORS = 5  # 3.2 of a process without a mailbox, 4.3 with one, 5 of a thread
_SPARE_DESCRIPTORS = 50


def check_workers(num_workers: int, *, backend: str, num_servers: int = 0) -> None:
    """Refuses more workers and servers than this machine has memory, or this process file descriptors for.

    Workers are "processes", "threads" or "programs", which import everything for themselves.
    """
    num = num_workers + num_servers
    each = {"processes": _PROCESS_BYTES, "threads": _THREAD_BYTES, "programs": _PROGRAM_BYTES}[backend]
    what = f"{num_workers:,} worker{'s' * (num_workers > 1)}" + f" and {num_servers:,} servers" * (num_servers > 0)
    SERVERS.check(f"The number of workers{' and servers' * (num_servers > 0)}", num)
    simulator = "paceline simulate takes thousands"
    free = available_bytes(by_this_process=backend == "threads")
    if num * each > free:
        raise _too_much(num * each, free, f"{what} as {backend}", f"start {free // each:,} at most; {simulator}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = (limit - _SPARE_DESCRIPTORS) // _DESCRIPTORS
    if limit != resource.RLIM_INFINITY and num > room:
        raise UsageError(
            f"For {what}, {num * _DESCRIPTORS:,} file descriptors are needed, but this process may open only "
            f"{limit:,}: start {max(1, room):,} at most, or raise ulimit -n; {simulator}."
        )


def check_simulation(num_workers: int, held_bytes: float = 0.0) -> None:
    """Refuses more simulated workers than this machine's memory holds; `held_bytes`: all of theirs, besides a fixed cost."""
    each = _SIMULATED_BYTES + held_bytes / num_workers
    most = int(available_bytes() / each)
    remedy = f"simulate {most:,} at most, or leave the gradients out with --timing-only --parameters N"
    check_memory(num_workers * each, f"{num_workers:,} simulated workers and servers", remedy)


def check_vectors(num_vectors: int, num_parameters: int, vector_bytes: int) -> None:
    """Refuses more copies of a model's parameters, on all workers and servers, than fit."""
    what = f"{num_vectors:,} vectors of {num_parameters:,} parameters"
    remedy = "start fewer workers, or train a smaller model"
    check_memory(num_vectors * vector_bytes, what, remedy, by_this_process=False)


def check_memory(needed_bytes: float, what: str, remedy: str, *, by_this_process: bool = True) -> None:
    """Raises `UsageError` if `what` needs more memory than there is, for this process or any; `remedy` ends the message."""
    available = available_bytes(by_this_process=by_this_process)
    if needed_bytes > available:
        raise _too_much(needed_bytes, available, what, remedy)


def _too_much(needed_bytes: float, available: int, what: str, remedy: str) -> UsageError:
    needed, there = size_text(needed_bytes), size_text(available)
    return UsageError(f"For {what}, about {needed} of memory are needed, but only {there} are available: {remedy}.")


def available_bytes(*, by_this_process: bool = True) -> int:
    """Memory that may still be taken: what the machine and the container have, and `ulimit -v` leaves this process."""
    own = _of_address_space() if by_this_process else ()
    return max(0, min([_of_machine(), *_of_control_groups(), *own]))


def _of_machine() -> int:
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_control_groups() -> Iterator[int]:
    """Memory left by the limits of this process's control group (version 2) and its parents; file caches count as free."""
    lines = _OWN_GROUP.read_text().splitlines() if _OWN_GROUP.is_file() else []
    own = next((one.removeprefix("0::/") for one in lines if one.startswith("0::/")), "")
    folder = _CONTROL_GROUPS / own
    for group in (folder, *folder.parents):
        limit, used, about = (group / f"memory.{name}" for name in ("max", "current", "stat"))
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            cached = next((one for one in about.read_text().splitlines() if one.startswith("inactive_file ")), "x 0")
            yield int(most) - int(used.read_text()) + int(cached.split()[1])
        if group == _CONTROL_GROUPS:
            return


def _of_address_space() -> Iterator[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    mapped = Path("/proc/self/statm")
    if limit != resource.RLIM_INFINITY and mapped.is_file():
        yield limit - int(mapped.read_text().split()[0]) * resource.getpagesize()


def size_text(num_bytes: float) -> str:
    """Bytes in a readable unit.

    >>> size_text(3 * 2**30), size_text(5e19)
    ('3.0 GiB', '43.4 EiB')
    """
    units = iter(("MiB", "GiB", "TiB", "PiB", "EiB"))
    size, unit = num_bytes / 2**20, next(units)
    while size >= 1000 and unit != "EiB":
        size, unit = size / 1024, next(units)
    return f"{size:,.1f} {unit}"


def as_float(number: Any) -> float:
    """A number as a float; an integer of hundreds of digits becomes infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{number:g}")
