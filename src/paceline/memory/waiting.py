"""Waiting until a word of shared memory changes: a short spin, a few yields, then the kernel's futex.

A futex sleeps at most `SLICE_S`, so a lost wake-up, a waker that was killed before it could wake, or an abort word set
by a supervisor delays a waiter by that much and never hangs it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time

from paceline.errors import RunStopped
from paceline.memory.atomics import kernel, load, pause
from paceline.system.machine import num_cores

SLICE_S = 0.05

# About 2-5 us: as long as a futex sleep and wake would take. A longer spin would steal the time slice of the awaited worker
# as soon as there are more workers than cores.
_SPIN_ROUNDS = 100
# About 100-200 us, for workers with a core each: a whole update of a small model. Being woken takes tens of microseconds
# (more on a virtual machine, whose idle core must be woken first), and no other worker needs the core.
_PATIENT_SPIN_ROUNDS = 4000
_YIELDS = 4

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the waiters are other processes
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_HAS_FUTEX = sys.platform == "linux" and sys.byteorder == "little" and _SYS_FUTEX is not None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLICE = _Timespec(0, int(SLICE_S * 1e9))
_syscall = ctypes.CDLL(None).syscall
_spin_rounds = _SPIN_ROUNDS


@kernel("int64(int64, int64, int64)", releases_gil=True)
def _spin(address: int, value: int, rounds: int) -> int:
    for _ in range(rounds):
        now = load(address)
        if now != value:
            return now
        pause()
    return load(address)


def spin_patiently(address: int, value: int) -> int:
    """Spins as long as a waiter with a core to itself does; returns what the word is then."""
    return _spin(address, value, _PATIENT_SPIN_ROUNDS)


def have_core_each(num_workers: int) -> None:
    """Tells this process how many workers share the machine: waits spin longer while each has a core to itself."""
    global _spin_rounds
    cores = num_cores()
    _spin_rounds = _PATIENT_SPIN_ROUNDS if num_workers <= cores else _SPIN_ROUNDS


def wait_briefly(address: int, value: int) -> int:
    """Waits while the word is `value`, at most about `SLICE_S`; returns what it is now.

    The caller loops, and checks between two calls whether something else has ended its wait.
    """
    now = _spin(address, value, _spin_rounds)
    for _ in range(_YIELDS):
        if now != value:
            return now
        os.sched_yield()
        now = load(address)
    if now == value:
        if _HAS_FUTEX:
            # A futex compares 32 bits: the word's low half (little-endian). The kernel compares and goes to sleep in
            # one step, so a change between our load and its sleep is not missed.
            _syscall(
                ctypes.c_long(_SYS_FUTEX or 0),
                ctypes.c_void_p(address),
                ctypes.c_int(_FUTEX_WAIT),
                ctypes.c_uint32(value & 0xFFFFFFFF),
                ctypes.byref(_SLICE),
                None,
                ctypes.c_int(0),
            )
        else:
            time.sleep(0.0002)
        now = load(address)
    return now


def wake(address: int, count: int = 2**31 - 1) -> None:
    """Wakes up to `count` waiters for a change of this word, or all; change it first."""
    if _HAS_FUTEX:
        _syscall(
            ctypes.c_long(_SYS_FUTEX or 0),
            ctypes.c_void_p(address),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(count),
            None,
            None,
            ctypes.c_int(0),
        )


def raise_if_stopped(abort_address: int) -> None:
    """Raises `RunStopped` if the supervisor has set the abort word (address 0: there is none)."""
    if abort_address and load(abort_address):
        raise RunStopped("the run was stopped while this worker waited for another one")


def sleep_precisely(duration_s: float, abort_address: int = 0) -> None:
    """Sleeps to within a few microseconds, or until the run is stopped; other processes get the core meanwhile.

    The kernel wakes a sleeper some 60 us late (timer slack 50 us), which is more than a whole update of a small model; so
    this function yields during the last part.
    """
    until_s = time.perf_counter() + duration_s
    while (left_s := until_s - time.perf_counter()) > 0.0001:
        raise_if_stopped(abort_address)
        time.sleep(min(SLICE_S, left_s - 0.0001))
    while time.perf_counter() < until_s:
        os.sched_yield()
