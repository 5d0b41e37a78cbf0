"""Modules that the fork server imports once, so that a worker starts in milliseconds: torch, kernels, task machinery."""

from __future__ import annotations

import contextlib
import gc

from paceline.errors import UsageError

with contextlib.suppress(UsageError):  # the program imports the same modules and reports it
    import torch

    import paceline.run.task_worker
    import paceline.worker.attach
    import paceline.worker.memberships.supervised  # noqa: F401
    from paceline.memory import warm_up
    from paceline.system.interrupts import leave_to_supervisor

    leave_to_supervisor()
    warm_up()
    # The first optimizer of a process imports half of torch's compiler, which takes a second; its first call the profiler.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    gc.collect()
    gc.freeze()  # a worker's collections pass over what it has inherited
