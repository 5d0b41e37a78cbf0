"""Evaluations of a launched loop: a process beside worker 0 makes them when the supervisor asks.

The process is forked once, before training. So the user's function and its data are not sent anywhere, it has its own random
numbers, and workers wait neither for it nor for a shared interpreter. It ends when it is told to, or with worker 0's process.
With worker threads it is a thread, and so it is on a GPU, which a forked process cannot use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial

import torch

from paceline.memory.arena import Arena
from paceline.system.interrupts import leave_to_supervisor
from paceline.system.tagged_output import flush_output
from paceline.worker.evaluation_channel import NICENESS, EvaluationChannel
from paceline.worker.evaluator import Evaluator

_PR_SET_PDEATHSIG = 1


def begin_evaluations(arena: Arena, evaluator: Evaluator, *, own_process: bool, on_gpu: bool) -> Callable[[], None]:
    """Starts a run's evaluator: a process, or a thread if workers are threads or models on GPUs; returns what joins it."""
    plan = arena.plan
    view = Arena(arena.segment, plan, participant_id=plan.num_workers + plan.num_server_programs)
    channel = EvaluationChannel(arena)
    if not own_process:
        return channel.serve_in_thread(view, evaluator).join
    if on_gpu:
        return channel.serve_in_thread(view, evaluator, os.getpid()).join
    return partial(_join, _start_process(channel, view, evaluator))


def _start_process(channel: EvaluationChannel, arena: Arena, evaluator: Evaluator) -> int:
    flush_output()  # or both processes would write the buffered text
    parent = os.getpid()
    with warnings.catch_warnings():
        # Of forks beside threads: none of them runs Python that locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        channel.tell_process(process)
        return process
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        leave_to_supervisor()
        if os.getppid() == parent:  # it has not died before
            torch.set_num_threads(1)
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
            channel.serve(arena, evaluator)
    finally:
        os._exit(0)


def _join(process: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
