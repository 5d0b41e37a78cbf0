"""`paceline simulate` as a function: one task, one algorithm, simulated workers, and the same files as a real run."""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from paceline.data.plan import BatchPlan
from paceline.data.round_deal import ALL_LEFT
from paceline.data.sources import BatchClaims, DatasetBatches
from paceline.errors import DivergedError, RunStopped, UsageError
from paceline.loop.base_replica import BaseReplica
from paceline.loop.buckets import bucket_bytes_for, bucket_ranges
from paceline.loop.task_replica import TaskReplica
from paceline.memory.placement import placement_registry
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers
from paceline.ports.ports import Ports
from paceline.ports.round_shares import RoundShares
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.simulated_driver import drive, machine_for, survivors_in
from paceline.run.simulated_sources import BatchSizes, DeclaredBatches, OwnRandomness
from paceline.run.simulation_record import SimulationRecord
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Faults
from paceline.simulator.hardware.sockets import Placing
from paceline.simulator.overlap import declared_buckets
from paceline.simulator.program import ProgramError
from paceline.simulator.replica import OwnBuffers, RandomStates, SimulatedReplica, TimedReplica
from paceline.specs.bounds import PARAMETERS
from paceline.specs.registry import check_optimizer
from paceline.system.interrupts import Interruption
from paceline.system.machine import intra_op_threads, uncollected
from paceline.system.torch_random import torch_state, torch_undisturbed
from paceline.tasks.load import load_task
from paceline.worker.evaluator import Evaluator, initial_loss, task_evaluator

_DECLARED_ELEMENT_BYTES = 4  # of parameters that are only declared: float32


def simulate_task(
    config: TrainConfig,
    *,
    cluster: Cluster | None = None,
    timing_only: bool = False,
    num_parameters: int | None = None,
    faults: Faults | None = None,
    out: Path | None = None,
    command: str = "",
) -> RunData:
    """Trains a task with simulated workers: every gradient is computed, only time is virtual.

    Equal arguments give equal results, bit for bit (same machine and versions). Buffers such as running statistics are as in
    a real run: one copy that all workers write; in lockstep every worker keeps its own, and those of the first worker that is
    alive are the run's.
    Costs: the gradients, one after the other; timing only, 20 us per step with ten workers, 40 to 50 with 1,000 to 10,000; 5
    more for each bucket of `all-reduce`'s gradient, and some for each lost race of `leashed`, which with unbounded persistence
    and hundreds of workers can outnumber the steps by far.
    Not: `train`, whose workers are real and whose times are measured.

    Args:
        config: the configuration; ignores `backend` and checkpoints, and `placement` unless the cluster has sockets.
        cluster: workers and speeds; it determines the number of workers. None: the default with `config.workers`.
        timing_only: compute no gradient: the worker programs run on empty vectors, and no loss is known.
        num_parameters: for timing only: length of the vectors, float32, instead of the task's; with `steps` set, no data
            are loaded either.
        faults: what goes wrong, and when. As in a real run, up to `config.restarts` dead workers are replaced. Under a
            method that needs all workers, the run ends instead, unless the workers share one machine and continue without
            dead ones.
        out: the run's folder, new or empty; None: nothing is written. Host times, dates and paths are only in its `host.json`.
        command: the command line, for the report and `host.json`.

    Ctrl-C, and SIGTERM unless the program handles it, end it at that instant: the simulation so far is written, and then the
    signal takes its course.

    Returns:
        The run, on virtual time; `result["outcome"]` is converged, stopped, diverged or crashed.

    Raises:
        UsageError: the configuration cannot be run, or `out` holds something; nothing was written.
        NotWrittenError: a file could not be written; the error's `run` has the simulation's result.
    """

    def make() -> TaskSimulation:
        simulation = TaskSimulation(config, cluster, timing_only, num_parameters, faults)
        simulation.algorithm.warn(simulation.cluster.workers, stacklevel=5)
        return simulation

    host = {"command": command, "data": str(config.data) if config.data is not None else None}
    # Timing only makes no cycles, and a collection that walks through thousands of programs finds nothing.
    with uncollected() if timing_only else nullcontext():
        return drive(make, out, command=command, host=host)


class TaskSimulation:
    """One call of `simulate_task`, from its validation to its result."""

    def __init__(
        self,
        config: TrainConfig,
        cluster: Cluster | None = None,
        timing_only: bool = False,
        num_parameters: int | None = None,
        faults: Faults | None = None,
        *,
        evaluates: bool = True,
    ) -> None:
        cluster = cluster or Cluster(workers=config.workers)
        self.cluster = cluster
        self.faults = Faults.given(faults)
        self.timing_only = timing_only
        self.task = load_task(config.task)
        self.config = dataclasses.replace(config, backend="simulator", workers=cluster.workers).resolved(self.task)
        self.algorithm = self.config.built_algorithm
        self._batch_size = cast(int, self.config.batch_size)
        self._most_steps = self.config.steps
        self.declared = num_parameters is not None and self.config.steps is not None
        self._check(num_parameters)
        self.plan: BatchPlan | None = None
        self._left = ALL_LEFT
        self.evaluator: Evaluator | None = None
        self.model: nn.Module | None = None
        loss = None
        if not self.declared:
            self.train_set, test_set = self.task.load(config.data)
            self.plan = self.config.plan(self.train_set)
            if evaluates and not timing_only:
                self.evaluator = task_evaluator(self.task, test_set, config.seed)
                loss = initial_loss(self.task, self.evaluator, self.train_set)
        self.algorithm = self.config.delayed_algorithm(self.plan)
        self.has_own_buffers = self.algorithm.lockstep  # whether each worker keeps the model's buffers to itself
        if timing_only and num_parameters is not None:
            self.num_parameters = num_parameters
            x, vector_bytes = torch.empty(0), num_parameters * _DECLARED_ELEMENT_BYTES
        else:
            with torch_undisturbed():
                self.model = self.task.new_model(config.seed)
                self._random_after_model = torch_state()
            self.binding = FlatBinding(self.model.parameters())
            if not timing_only:
                self.config.make_optimizer(self.binding.parameters)  # refuses bad arguments before anything runs
            self.num_parameters = self.binding.num_parameters
            x = torch.empty(self.binding.num_elements, dtype=self.binding.dtype)
            vector_bytes = x.numel() * x.element_size()
            self.binding.read(x)
            x = x[:0] if timing_only else x
        self.machine = machine_for(
            self.algorithm,
            cluster,
            x=x,
            vector_bytes=vector_bytes,
            batch_size=self._batch_size,
            seed=config.seed,
            faults=self.faults,
            placing=self._placing(),
            restarts=config.restarts,
            min_workers=config.min_workers,
        )
        self.scheduler = self.machine.scheduler
        if self.algorithm.needs.averaged and self.model is not None:
            floating = {name: one for name, one in dense_buffers(self.model).items() if one.is_floating_point()}
            self.machine.shared.average_also(floating)
        self._goal = self.config.goal(loss)
        self.record = SimulationRecord(
            self.machine,
            self.algorithm,
            self._goal,
            self.config.about_task(self.algorithm),
            evaluator=self.evaluator,
            buffers=dense_buffers(self.model) if self.model is not None else {},
            initial_loss=loss,
            epoch_samples=self.plan.num_samples if self.plan is not None else 0,
            timing_only=timing_only,
        )

    def _check(self, num_parameters: int | None) -> None:
        config = self.config
        self.algorithm.check(config.workers)
        self.algorithm.check_min_workers(config.min_workers, config.workers)
        self.faults.check(config.workers)
        if config.optimizer_state == "shared":
            raise UsageError("Simulations do not support optimizer state that workers share; leave it per worker.")
        if config.layout is not None:
            raise UsageError("Layouts are not simulated: leave the layout out, or train with real workers.")
        if config.slow is not None:
            raise UsageError("The cluster says how slow simulated workers are: use Cluster.slow, or --slow.")
        if num_parameters is not None and not self.timing_only:
            raise UsageError("A declared number of parameters needs timing_only (--timing-only); add it.")
        if num_parameters is not None:
            PARAMETERS.check("The number of parameters", num_parameters)
        built = check_optimizer(config.optimizer, config.learning_rate, config.momentum)
        self.algorithm.check_optimizers(built, config.workers)
        targets = (config.target_loss, config.target_accuracy, config.target_fraction)
        if self.timing_only and config.min_workers > 1:
            raise UsageError("With timing_only, dead workers are not replaced; leave out min_workers.")
        if self.timing_only and any(target is not None for target in targets):
            raise UsageError("With timing_only, a simulation computes no loss and no accuracy; leave out the target.")

    def _placing(self) -> Placing | None:
        """The effect of `placement` on the simulated machine."""
        if self.cluster.sockets is None:
            return None
        policy: Any = self.config.placement.partition("(")[0]
        placement = placement_registry.build(self.config.placement)
        return Placing(policy=policy, node=getattr(placement, "node", 0), pin=placement.pin)

    def _bucket_sizes(self) -> list[int]:
        """Sizes of a gradient's buckets in bytes; if parameters are only declared, all but the last are equal."""
        bucket_bytes = bucket_bytes_for(self.config.workers, self.algorithm.needs.bucket_bytes)
        if self.model is None:
            return declared_buckets(self.num_parameters * _DECLARED_ELEMENT_BYTES, bucket_bytes)
        return [(end - begin) * self.binding.dtype.itemsize for begin, end in bucket_ranges(self.binding, bucket_bytes)]

    # The workers

    def _make_replicas(self) -> Callable[[int], BaseReplica]:
        """A function that makes the replica of a worker, or its next incarnation, and starts its program."""
        machine, config, numbers = self.machine, self.config, itertools.count()
        claim_batch = itertools.count().__next__  # of all workers

        if not self.timing_only:
            torch.set_rng_state(self._random_after_model)
        random_states = RandomStates()
        is_plain = config.optimizer == "sgd" and not config.momentum
        declared = {"bucket_sizes": self._bucket_sizes(), "is_plain_sgd": is_plain}
        has_own = self.has_own_buffers and self.model is not None and any(True for _ in self.model.buffers())
        buffers = OwnBuffers(cast(nn.Module, self.model), config.workers) if has_own else None
        if buffers is not None:
            self.record.before_evaluation = lambda: buffers.enter(machine.shared.model_ids()[0])

        def make(worker_id: int) -> BaseReplica:
            core = machine.core(worker_id)
            ports = machine.ports(core)
            base = {**machine.base_arguments(ports), "recorder": self.record.recorder(worker_id)}
            base |= {"core": core, "num_blocks": machine.num_blocks}
            taken = len(self.record.records_of(worker_id)) if ports.incarnation else 0
            if not self.timing_only and (worker_id or ports.incarnation):
                seed = hash((config.seed, worker_id, ports.incarnation)) & (2**63 - 1)
                random_states.begin(worker_id, seed)
            if buffers is not None and ports.incarnation and not self.algorithm.lockstep:
                buffers.begin(worker_id)
            shares = deal = claims = None
            if self.plan is None:
                if self.algorithm.by_speed and config.workers > 1:
                    shares = RoundShares(config.workers, self._batch_size)
                num_batches = cast(int, config.steps) - taken
                batches: Any = DeclaredBatches(numbers, num_batches, self._batch_size, worker_id, shares)
            else:
                claims = self._claims(self.plan, ports, claim_batch, taken)
                shares, deal = claims.shares, claims.deal
                if self.timing_only:
                    batches = BatchSizes(claims)
                else:
                    batches = OwnRandomness(DatasetBatches(self.train_set, claims), random_states, worker_id)
            if self.timing_only:
                replica: BaseReplica = TimedReplica(batches=batches, **declared, **base)
            else:
                base |= {"binding": self.binding, "random_states": random_states, "buffers": buffers}
                task = self.model, self.task.loss, config.make_optimizer, batches
                replica = self._replica(claims, *task, **base)
            replica.shares, replica.deal = shares, deal

            def work() -> None:
                if ports.incarnation and machine.lives.newcomers is not None and claims is not None:
                    try:
                        given = cast(dict[str, Any], machine.lives.enter(worker_id))
                    except RunStopped:
                        return
                    end = machine.shared.ends[worker_id]
                    machine.shared.enter(worker_id, given["giver"])
                    self.record.count_unrecorded_of(worker_id, ports.shared.version if end is None else end)
                    cast(Any, ports.views or ports.collectives).enter(given["group"])
                    claims.enter(given["deal"])
                    cast(TaskReplica, replica).enter(given)
                self._work(cast(Any, replica), ports)

            self._start(ports, work)
            return replica

        return make

    def _claims(self, plan: BatchPlan, ports: Ports[Any], claim_batch: Callable[[], int], taken: int) -> BatchClaims:
        return BatchClaims(
            plan,
            worker_id=ports.worker_id,
            lockstep=self.algorithm.lockstep,
            counter=claim_batch,
            max_epochs=self.config.epochs,
            max_steps=self._most_steps,
            taken=taken,
            left=self._left,
            tracks=self.algorithm.survivors_continue,
            survivors=survivors_in(self.algorithm, ports),
        )

    def _replica(self, claims: Any, *task: Any, **base: Any) -> SimulatedReplica:
        return SimulatedReplica(*task, **base)

    def _start(self, ports: Ports[Any], work: Callable[[], None]) -> None:
        self.machine.start(ports.worker_id, work)

    def _work(self, replica: Any, ports: Ports[Any]) -> None:
        self.algorithm.work(replica, ports)

    def run(self, interruption: Interruption | None = None) -> RunData:
        """Runs all programs; the caller's random state stays untouched."""
        with intra_op_threads(self.config.intra_op_threads), torch_undisturbed(), torch.no_grad():
            if self.model is not None:
                self.model.train()
            make = self._make_replicas()
            self.machine.lives.restart = make
            replicas = [make(worker_id) for worker_id in range(self.config.workers)]
            if self.algorithm.needs.servers:
                self.machine.start_servers(self.algorithm.serve)
            self._run_programs()
            del replicas
        if interruption is not None:
            self.record.interrupted_by(interruption)
        return self.record.finish(self._config_record(), num_parameters=self.num_parameters)

    def _run_programs(self) -> None:
        if self._goal.limit_s is not None:
            self.scheduler.stop_at(self._goal.limit_s)
        try:
            self.scheduler.run()
        except ProgramError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from None
            if isinstance(error.cause, DivergedError):
                self.record.end("diverged", f"Worker {error.worker_id}: {error.cause}")
            else:
                trace = "".join(traceback.format_exception(error.cause))
                self.record.end("crashed", str(error), trace)

    def _config_record(self) -> dict[str, Any]:
        record = dataclasses.asdict(self.config)
        for name in ("data", "placement", "checkpoint_every_s", "slow", "layout"):  # paths, and what plays no part here
            if name != "placement" or self.cluster.sockets is None:
                del record[name]
        return {
            **record,
            "timing_only": self.timing_only,
            "cluster": self.cluster.as_table(),
            **self.faults.as_record(),
        }
