"""`simulate`: the user's own training function on simulated workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import (
    DivergedError,
    NotReplacedError,
    PacelineError,
    UsageError,
    WorkerLostError,
    exits_in_order,
)
from paceline.membership.environment import set_environment
from paceline.optim.flat import FlatBinding, model_words
from paceline.optim.model_state import dense_buffers
from paceline.records.run_data import RunData
from paceline.records.summary import NO_UPDATE
from paceline.run.measured_cluster import RecordedConditions, recorded_conditions
from paceline.run.simulated_driver import drive, machine_for
from paceline.run.simulated_membership import SimulatedMembership, SimulatedRun
from paceline.run.simulation_record import SimulationRecord
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Faults
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.program import ProgramError
from paceline.simulator.scheduler import Scheduler
from paceline.specs.bounds import check_run, check_simulation
from paceline.specs.goal import Goal
from paceline.system import machine as system
from paceline.system.global_randomness import GlobalRandomness, undisturbed
from paceline.system.interrupts import Interruption
from paceline.system.torch_contexts import TorchContexts
from paceline.worker.chosen_algorithm import given_algorithm
from paceline.worker.memberships.entry import SimulatedEnvironment
from paceline.worker.supervised import NO_WORKER_0, refuse_inside_worker
from paceline.worker.user_evaluation import Evaluate, loop_evaluator


def simulate(
    train: Callable[[], Any],
    *,
    cluster: Cluster | None = None,
    workers: int | None = None,
    algorithm: Algorithm | str | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    restarts: int = 0,
    min_workers: int = 1,
    like: RunData | Path | str | None = None,
    intra_op_threads: int = 1,
    out: Path | str | None = None,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    limit_s: float | None = None,
    limit_samples: int | None = None,
    evaluate_every_samples: int | None = None,
) -> RunData:
    """Calls `train()` once per simulated worker; inside, `attach` makes them one run under a virtual clock.

    It is the same function that `launch` or torchrun runs. Every gradient, optimizer step and message is real; only time is
    virtual, and determines the order of events: equal arguments give equal results, bit for bit, on the same machine and
    versions. Python's, NumPy's and PyTorch's global generators are separate for each worker.
    Costs: all gradients, one after the other, in this process; a model and an optimizer per worker.
    Not: `simulate_task`, which simulates a built-in task with one model for all workers, and can leave the gradients out.

    Args:
        train: any callable; `RunData.returned` has its return values, by worker.
        cluster: workers and speeds; None: the default one of `workers`.
        workers: how many, if no cluster is given.
        algorithm: a spec or an instance; None if `attach` names it.
        seed: of the order of samples, of compute times and of everything random in the algorithm and in the workers.
        faults: what goes wrong, and when; a killed worker leaves its function at once (`finally` runs), returns nothing, and
            is listed in `result["workers_lost"]`.
        restarts: how many dead workers are replaced, each `Cluster.detection_s` plus `restart_s` after its death: its function
            is called again.
        min_workers: if fewer than this many workers are left, they wait for replacements, as under `launch`.
        like: a recorded run, or its folder, whose measured speeds, links, deaths and replacements are the cluster, the faults
            and `restarts`.
        intra_op_threads: threads inside one PyTorch operation, as `launch` gives its workers.
        out: the run's folder, new or empty; None: nothing is written.
        target_loss: stop once the mean of the last 100 losses of applied gradients, from `worker.report`, is at most this.
        target_accuracy: instead: stop once the `evaluate` passed to `attach` finds at least this.
        limit_s: stop after this many virtual seconds.
        limit_samples: stop after this many samples of applied gradients.
        evaluate_every_samples: call `evaluate` this often; None: every quarter of an epoch with a target accuracy, else every
            epoch (10,000 samples if `worker.batches` cannot know how long one is). Evaluations take no virtual time.

    A run that is stopped ends at that instant: the workers leave their functions at once (`finally` runs) and return nothing.
    Ctrl-C, and SIGTERM unless the program handles it, stop the run likewise; the simulation so far is written before the
    signal takes its course.

    Returns:
        The run, on virtual time; its outcome is converged, stopped or diverged.

    Raises:
        UsageError: the arguments cannot be simulated.
        WorkerLostError: an algorithm that cannot continue without a worker has lost one: by a fault, or because its loop ended
            early.
            Or all workers were killed.
        PacelineError: the workers wait for each other, or all have ended without an update.
        Exception: any other exception of a worker's function. A loss that is not finite raises none: the run ends as diverged.
    """
    if like is not None:
        cluster, faults, restarts = _like(like, cluster, faults, restarts)
    if cluster is None:
        cluster = Cluster(workers=workers if workers is not None else 2)
    elif workers is not None and workers != cluster.workers:
        raise UsageError(f"The cluster has {cluster.workers} workers, not {workers}: leave out workers.")
    refuse_inside_worker()
    check_run({"seed": seed, "restarts": restarts, "min_workers": min_workers})
    check_simulation(cluster.workers)
    named = given_algorithm(algorithm)
    folder = Path(out) if out is not None else None
    faults = Faults.given(faults)
    faults.check(cluster.workers)
    goal = Goal(
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        limit_s=limit_s,
        limit_samples=limit_samples,
        evaluate_every_samples=evaluate_every_samples,
    )
    is_evaluated = goal.any or folder is not None
    with system.intra_op_threads(intra_op_threads):
        make = partial(
            LoopSimulation, train, cluster, named, seed, faults, goal, restarts, min_workers, is_evaluated=is_evaluated
        )
        return drive(make, folder)


def _like(
    like: RunData | Path | str, cluster: Cluster | None, faults: Faults | None, restarts: int
) -> RecordedConditions:
    if not isinstance(like, RunData | Path | str):
        raise UsageError(f"like takes a run's folder or a RunData, not {type(like).__name__}.")
    if cluster is not None or faults is not None or restarts:
        raise UsageError(
            "like takes the cluster, faults and restarts from the run: leave out cluster, faults and restarts, or like."
        )
    return recorded_conditions(like)


class LoopSimulation(SimulatedRun):
    """One call of `simulate`: the run that `attach` joins.

    Attributes:
        member_kind: class of a worker's membership.
    """

    member_kind: ClassVar[type[SimulatedMembership]] = SimulatedMembership

    def __init__(
        self,
        train: Callable[[], Any],
        cluster: Cluster,
        algorithm: Algorithm | None,
        seed: int,
        faults: Faults,
        goal: Goal,
        restarts: int = 0,
        min_workers: int = 1,
        *,
        is_evaluated: bool,
    ) -> None:
        self._contexts, self._states = TorchContexts(), GlobalRandomness()
        super().__init__(Scheduler(outside=self._contexts.outside), cluster.workers, seed)
        self.algorithm = algorithm
        self.cluster, self.faults, self.goal = cluster, faults, goal
        self.returned: dict[int, Any] = {}
        self._replacing = {"restarts": restarts, "min_workers": min_workers}
        self._is_evaluated = is_evaluated
        self._train = train
        self._grad_mode = torch.is_grad_enabled()
        self._wanted: Any = None  # the first attaching worker's model and algorithm
        self._about = {
            "task": getattr(train, "__name__", "train"),
            "algorithm": None,
            "workers": cluster.workers,
            "backend": "simulator",
            "seed": seed,
        }

    @property
    def _spec(self) -> str | None:
        return registry.spec(self.algorithm) if self.algorithm is not None else None

    def run(self, interruption: Interruption) -> RunData:
        if self.goal.limit_s is not None:
            self.scheduler.stop_at(self.goal.limit_s)
        try:
            self.run_loops()
        except ProgramError as error:
            if self.record is not None and isinstance(error.cause, DivergedError):
                self.record.end("diverged", f"Worker {error.worker_id}: {error.cause}")
            elif not interruption:  # signals also end the processes of a worker's loader, whose next batch then fails
                raise error.cause from None
        if self.record is None or self.machine is None:
            interruption.raise_if_any()
            raise self.never_attached()
        self.record.interrupted_by(interruption)
        config = {
            **self._about,
            "algorithm": self._spec,
            "timing_only": False,
            "cluster": self.cluster.as_table(),
            **dataclasses.asdict(self.goal),
            **self._replacing,
            **self.faults.as_record(),
        }
        run = self.record.finish(config, num_parameters=self._wanted.num_parameters)
        run.returned = self.returned
        if run.result["outcome"] == "crashed":
            raise (
                WorkerLostError(run.result["outcome_reason"])
                if self.machine.lives.all_dead
                else PacelineError(NO_UPDATE)
            )
        return run

    def run_loops(self) -> None:
        """Calls the function once per worker, until all have returned.

        Raises:
            ProgramError: one has raised an exception.
        """
        states = self._states = GlobalRandomness()
        self.scheduler.on_resume = states.enter
        for worker_id in range(self.cluster.workers):
            self.scheduler.start(worker_id, self._body(worker_id), is_main=True)
        try:
            with self.after_backward:
                self.scheduler.run()
        finally:
            states.leave()

    def never_attached(self) -> UsageError:
        return UsageError(f"{self._about['task']} never called paceline.attach, so its workers shared nothing.")

    def _body(self, worker_id: int) -> Callable[[], None]:
        def body() -> None:
            set_environment(
                SimulatedEnvironment(
                    worker_id=worker_id,
                    num_workers=self.cluster.workers,
                    algorithm=self._spec,
                    seed=self.seed,
                    join=partial(self.join, worker_id),
                )
            )
            try:
                self.returned[worker_id] = self._train()
            except SystemExit as end:
                if not exits_in_order(end):
                    raise
            except NotReplacedError as error:
                self._give_up(worker_id, error.why)
                return
            finally:
                self._contexts.leave()
            self.scheduler.catch_up()
            if self.machine is not None:
                self.machine.lives.end(worker_id)

        return body

    def _begin_again(self, worker_id: int) -> None:
        """Calls the function again, for a dead worker's replacement."""
        self._states.begin_again(worker_id)
        with torch.set_grad_enabled(self._grad_mode):  # not that of the program that ran last
            self.scheduler.start(worker_id, self._body(worker_id), is_main=True)

    def _give_up(self, worker_id: int, why: str) -> None:
        """A replacement cannot take part: the others go on without it."""
        assert self.machine is not None
        assert self.record is not None
        self.record.notes.append(f"Worker {worker_id} is not replaced: {why}.")
        lose = partial(self.machine.lives.lose, worker_id, is_replaced=False)
        self.scheduler.call_at(self.scheduler.now_s, lose)

    def join(
        self,
        worker_id: int,
        model: nn.Module,
        algorithm: Algorithm,
        random_states: tuple[int, ...],
        evaluate: Evaluate | None,
    ) -> SimulatedMembership:
        """Worker 0 joins first, with the initial state of all workers; all wait for the last one."""
        binding = FlatBinding(model.parameters())
        if self.machine is None:
            if worker_id:
                raise UsageError(NO_WORKER_0)
            self._begin(model, binding, algorithm, evaluate)
        elif algorithm != self.algorithm or model_words(model) != model_words(self.model):
            raise UsageError(
                f"Worker {worker_id} wants {registry.spec(algorithm)} on {binding.num_parameters:,} parameters,"
                f" the others {self._spec} on {self._wanted.num_parameters:,}: all workers must build the same model,"
                " in one memory format."
            )
        assert self.machine is not None
        member = self.member_kind(self, model, binding, worker_id, random_states)
        if not member.incarnation:
            self.gathering.gather(worker_id, None)  # no messages to a worker that has no mailbox yet
        # Not earlier: the run waits for a worker that does not attach, and names it.
        self.machine.lives.on_gone = self.leave
        return member

    def _begin(self, model: nn.Module, binding: FlatBinding, algorithm: Algorithm, evaluate: Evaluate | None) -> None:
        """Makes the machine, and the object that records and stops the run, for worker 0's model."""
        algorithm.check_min_workers(self._replacing["min_workers"], self.cluster.workers)
        self._wanted, self.algorithm, self.model = binding, algorithm, model
        x = torch.empty(binding.num_elements, dtype=binding.dtype)
        binding.read(x)
        self.machine = machine_for(
            algorithm,
            self.cluster,
            x=x,
            vector_bytes=x.numel() * x.element_size(),
            batch_size=0,
            seed=self.seed,
            faults=self.faults,
            scheduler=self.scheduler,
            **self._replacing,
        )
        self.machine.lives.restart = self._begin_again
        self.buffers = dense_buffers(model)
        if not algorithm.lockstep:
            self.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self.goal.check(evaluate)
        evaluator = None
        if evaluate is not None and self._is_evaluated:
            needs_accuracy = self.goal.target_accuracy is not None
            outside = self._contexts.outside(torch.no_grad()(undisturbed()(evaluate)))
            evaluator = loop_evaluator(model, outside, needs_accuracy=needs_accuracy)
        about = {**self._about, "algorithm": self._spec, "batch_size": None}
        self.record = SimulationRecord(
            self.machine, algorithm, self.goal, about, evaluator=evaluator, buffers=self.buffers
        )
        self.order_programs(self.machine)
        if algorithm.needs.servers:
            self.machine.start_servers(algorithm.serve)

    def order_programs(self, machine: SimulatedMachine) -> None:
        """Called before any program runs: a replay prescribes their order."""
