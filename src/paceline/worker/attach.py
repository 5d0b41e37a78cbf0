"""`attach`: the user's own loop under any algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import UsageError, shown
from paceline.membership.environment import current_environment
from paceline.worker.arguments import as_one_model, as_one_optimizer
from paceline.worker.chosen_algorithm import chosen_algorithm
from paceline.worker.lone import LoneWorker
from paceline.worker.memberships.entry import is_plain
from paceline.worker.user_evaluation import Evaluate
from paceline.worker.worker import Worker


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str | None = None,
    *,
    evaluate: Evaluate | None = None,
    same_random: bool = False,
    layout: Any = None,
    example_inputs: torch.Tensor | None = None,
) -> Worker:
    """Runs a training loop as one worker of a run: `with paceline.attach(model, optimizer) as worker:`.

    Inside, the model's parameters live in memory that all workers share, and `optimizer.step()` applies the algorithm. The
    exit waits for workers that still train. Afterwards model and optimizer are as before, with the run's last values, or with
    those that worker 0's loop loaded into its model after its last step. Without a launcher the loop is plain PyTorch: nothing
    is replaced, hooked or flattened under any algorithm except `sequential(delay=...)`.

    Workers that torchrun, Ray Train, TorchDistributor, Slurm or Open MPI started meet at MASTER_ADDR and MASTER_PORT. Workers
    that find an address in PACELINE_JOIN, which `paceline launch` sets, join the run there and outlive each other; they need
    an `algorithm` such as `ad-psgd`. All start with worker 0's model; each worker then keeps its own buffers, and worker 0's
    are the run's.

    With `all-reduce`, gradients are the mean of all workers when `backward` returns, and clipping acts on the mean. Otherwise
    it acts on the worker's own gradient; if an update is the mean of several, a `ClippingWarning` says so once. If one
    worker's scaled gradients overflow, all skip that step if they make one update together; else only this worker does.
    A parameter without a gradient on any worker that takes part in the update makes no step: no weight decay, no state.

    Costs per step: 20 to 60 us by processor, besides the algorithm's own cost; without a launcher nothing.

    Args:
        model: its parameters that require gradients are trained; all of one floating-point dtype, on the CPU, or
            on one CUDA GPU; the loop then uses one stream, and recorded times are the host's.
            A tuple of models, such as (generator, discriminator), has the parameters of all.
        optimizer: any torch.optim optimizer over them; LBFGS for `lockstep` and `all-reduce`. With a list, a step of the run
            consists of one step of each, all with one gradient. If models are a tuple, too, the optimizers step in turn, each
            with its own gradient: each of these is a step of the run, in which the other parameters have no gradient, and
            all-reduce averages in `step`. Lists are for `hogwild`, `locked`, `leashed`, `lockstep`, whole `all-reduce`,
            `local-sgd` and methods with servers.
        algorithm: how the workers agree; None: the launcher's choice or PACELINE_ALGORITHM, else all-reduce.
        evaluate: maps a model to its test accuracy, from 0 to 1, or to a mapping with "accuracy", "loss" or both. Only
            `launch` and `simulate` call it, if the run has a target or a limit, or is written to a folder; it decides whether
            a target accuracy is reached. It gets a copy of the model, in evaluation mode and without gradients, with the run's
            newest parameters (the mean of all workers' models if each has its own). Frozen parameters are as at `attach`:
            evaluate a moving average in the loop.
        same_random: keeps all generators as they are. By default, a global generator (Python's, NumPy's, PyTorch's) with the
            same state on all workers gets a different one on each worker but 0.
        layout: how the model is divided, as `hybrid(groups=2)` or `tensor(line=4)`; None: every worker has all of it.
        example_inputs: the model's inputs for a worker's batch (samples, ...), equally long on all workers; used to choose a
            layout's `groups=auto`.

    Raises:
        UsageError: the launcher and the loop name different algorithms, or the model cannot be shared.
    """
    others: dict[str, Any] = {"same_random": same_random}
    if isinstance(layout, str):  # loaded by name, as `worker_kind` is: their folder imports this one
        layout = resolve_name("paceline.model_parallel.layouts:layout_of")(layout)
    if layout is not None:
        if not hasattr(type(layout), "worker_kind"):
            raise UsageError(
                f"layout must be a spec, such as 'tensor(line=4)', or pl.TensorParallel(line=4), not {shown(layout)}."
            )
        others |= {"layout": layout, "example_inputs": example_inputs}
    elif example_inputs is not None:
        raise UsageError(
            "example_inputs are used only to choose a layout: give attach a layout, too, or leave them out."
        )
    own_kind = getattr(model, "worker_kind", None) or getattr(layout, "worker_kind", None)
    kind: Any = resolve_name(own_kind) if own_kind else Worker
    environment = current_environment()
    chosen = chosen_algorithm(algorithm, environment, kind.program)
    plain = is_plain(environment, chosen)
    in_turn = not isinstance(model, nn.Module)
    optimizer = as_one_optimizer(optimizer, None if plain else chosen, environment, in_turn=in_turn)
    module, evaluate = as_one_model(model, evaluate)
    worker = kind(module, optimizer, chosen, environment, evaluate, **others)
    return LoneWorker(worker) if plain else worker
