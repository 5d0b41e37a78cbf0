"""A worker of a placed model, whose loop attaches a part of it."""

from __future__ import annotations

import time
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.algorithms import Algorithm
from paceline.errors import UsageError, WorkerLostError
from paceline.loop.guards.noted_gradients import NotedGradients
from paceline.membership.environment import (
    Invitation,
    LaunchedEnvironment,
    SupervisedEnvironment,
    WorkerEnvironment,
)
from paceline.membership.final_mean import FinalMean, LeftWeights
from paceline.model_parallel.graph.exchange import Exchange, described
from paceline.model_parallel.graph.execute import PlacedPart
from paceline.model_parallel.graph.program import PlacedProgram
from paceline.model_parallel.graph.recorder import Recorder
from paceline.model_parallel.graph.replica_part import ReplicaPart, check_replicas
from paceline.optim.clipping import with_dense_gradient
from paceline.optim.group_options import GroupOptions
from paceline.optim.saved_state import check_state
from paceline.optim.several_optimizers import members_of
from paceline.records import checkpoint_contents as checkpoint
from paceline.system.saved_state import fits
from paceline.worker.memberships.entry import Entry
from paceline.worker.memberships.layout_part import Division
from paceline.worker.memberships.membership import Membership
from paceline.worker.worker import Worker

_CHANGED = (
    "Each worker of a placed model has only the gradients of its own part, so changes that a loop makes to them between"
    " backward and step would differ between workers: clip by worker.clip_grad_norm_(max_norm), clip single elements with"
    " p.register_hook(lambda g: g.clamp(-1, 1)), and leave out GradScaler and other changes."
)

_UNSOUND = "The checkpoint in {} is not one that a placed run of this model writes: start the run again without it."

_NEWS_DEADLINE_S, _LOOK_EVERY_S = 5.0, 1e-3

_NO_NORM = torch.tensor(-1.0, dtype=torch.float64)  # of a gradient that another worker has, or that does not exist

_Settings = dict[str, tuple[dict[str, Any], dict[str, Any]]]


class PlacedWorker(Worker):
    """One worker of a placed model, as its loop sees it.

    Checkpoints identify parameters by name. Each worker saves its part with its optimizer's state, so a resumed run can divide
    the model by another plan and among another number of workers.

    With an algorithm whose servers hold the parts, groups of workers are its replicas. Checkpoints are then like those of
    layouts, and need the same plan.
    """

    program: ClassVar[Algorithm | None] = PlacedProgram()

    def __init__(
        self,
        part: PlacedPart,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        environment: WorkerEnvironment | None,
        evaluate: Any = None,
        *,
        same_random: bool,
        layout: Any = None,
        example_inputs: torch.Tensor | None = None,
    ) -> None:
        if layout is not None:
            raise UsageError("A part of a placed model takes no layout: leave it out of attach.")
        self._has_replicas = has_replicas = algorithm is not self.program
        _check(part, environment, has_replicas=has_replicas)
        if has_replicas:
            _check_named(algorithm, environment)
        super().__init__(
            part.whole, optimizer, algorithm, environment, evaluate, same_random=same_random or not has_replicas
        )
        self._part = self._held = part
        has_checkpoints = isinstance(environment, SupervisedEnvironment | LaunchedEnvironment)
        self._resume = environment.resume if has_checkpoints else None

    def _enter(self) -> Entry:
        environment, part = self._environment, self._part
        if isinstance(environment, LaunchedEnvironment):
            from paceline.worker.memberships.launched import LaunchedMembership

            join = partial(LaunchedMembership, environment, plan=part.plan.title)
            return Entry(environment.worker_id, environment.num_workers, join)
        if isinstance(environment, Invitation):
            from paceline.model_parallel.graph.joined import JoinedPart

            return Entry(
                part.joined.worker_id, part.joined.num_workers, partial(JoinedPart, part.joined, environment.out)
            )
        return super()._enter()

    def _join(self, entry: Entry, states: tuple[int, ...]) -> Membership:
        if not self._has_replicas:
            return super()._join(entry, states)
        division = Division("placed", lambda _, *place: ReplicaPart(self._part, *place))
        join: Any = entry.join
        return join(self._model, self.algorithm, states, self._evaluate, layout=division)

    def _begin(self) -> None:
        self._calls = 0
        self._exchange: Exchange | None = None
        self._saved: _Settings = {}
        if self._part.plan.workers > 1:
            self._noted = noted = NotedGradients([one for one in self._part.parameters() if one.requires_grad])
            check = self._optimizer.register_step_pre_hook(partial(_check_gradients, noted))
            self._undo += [noted.remove, check.remove]
        self._options = GroupOptions(self._optimizer, {id(one): name for name, one in self._part.named_parameters()})
        super()._begin()
        run: Any = self._membership
        part = self._part
        if self._environment is not None:
            mailbox, replica = (run.part.mates, run.dealt[0]) if self._has_replicas else (run.ports.mailbox, 0)
            if mailbox is not None:
                self._exchange = Exchange(mailbox, part.worker, wire=part.plan.wire, **self._exchange_options(replica))
            part.connect(self._exchange or Exchange.alone(), self._calls, replica)
            if self._has_replicas:
                run.part.exchange = self._exchange
        if run.ports.storage is not None:
            run.ports.storage.keep(self._own_state, 0)
        if self._saved:
            self._replica.on_progress.append(self._restore_options)

    def _exchange_options(self, replica: int) -> dict[str, Any]:
        environment, worker = self._environment, self._part.worker
        if isinstance(environment, LaunchedEnvironment | Invitation):
            return {"deadline_s": environment.deadline_s}
        assert isinstance(environment, SupervisedEnvironment)
        is_recorded = environment.checkpoint is not None and not replica
        return {
            "first": environment.worker_id - worker,
            "deadline_s": environment.step_deadline_s,
            "slowness": environment.slow.get(environment.worker_id, 1.0),
            "recorder": Recorder(worker) if is_recorded else None,
        }

    def clip_grad_norm_(self, max_norm: float) -> float:
        """As in `Worker`, over the whole model; costs a message between any two workers. All of them must call it."""
        exchange = self._exchange
        if exchange is None or self._part.plan.workers == 1:
            return super().clip_grad_norm_(max_norm)
        own = {name: with_dense_gradient(one) for name, one in self._part.named_parameters()}
        norms = [
            torch.linalg.vector_norm(own[name].grad).double()
            if name in own and own[name].grad is not None
            else _NO_NORM
            for name, _ in self._part.whole.named_parameters()
        ]
        # As PyTorch computes it, in the model's order, and therefore equal to the last bit.
        norm_of = torch.stack([*exchange.gather(torch.stack(norms), self._part.plan.workers)]).amax(0)
        dtype = reduce(torch.promote_types, (one.dtype for one in self._part.whole.parameters()))
        total = torch.linalg.vector_norm(norm_of[norm_of != _NO_NORM].to(dtype))
        torch.nn.utils.clip_grads_with_norm_(own.values(), max_norm, total)
        for one in self._part.parameters():
            self._noted.note(one)
        return float(total)

    def follow(self, scheduler: Any, *, samples_per_step: int | None = None) -> Any:
        """As in `Worker`; after a resume, the scheduler steps before the checkpoint's settings are restored."""
        followed = super().follow(scheduler, samples_per_step=samples_per_step)
        if self._saved:
            calls = self._replica.on_progress
            calls.append(calls.pop(calls.index(self._restore_options)))
        return followed

    def _restore_options(self) -> None:
        """Restores optimizer settings at the first batch, after the loop has made its own."""
        if self._saved:
            self._options.restore(self._saved)
            self._saved = {}

    def _final_model(self, left: LeftWeights | None) -> tuple[torch.Tensor, FinalMean | None]:
        """As in `Worker`; without shared memory, the workers send each other their parts."""
        final, mean = super()._final_model(left)
        is_shared = isinstance(self._environment, SupervisedEnvironment)
        if self._exchange is not None and not (is_shared or self._membership.stopped()):
            self._exchange_parts(self._exchange, final, left)
        return final, mean

    def _exchange_parts(self, exchange: Exchange, final: torch.Tensor, left: LeftWeights | None) -> None:
        """Completes the parameters (P,) and buffers by those of all parts, or by all that worker 0's loop has `left`."""
        part, binding, workers = self._part, self._membership.binding, range(self.num_workers)
        is_left = torch.tensor([left is not None], dtype=torch.float64)
        is_all_of_0 = bool(exchange.gather(is_left, self.num_workers, "the end of its loop")[0])
        if left is not None:
            final.copy_(left.x)
        views = dict(zip(map(id, binding.parameters), binding.views(final), strict=True))
        trained = [(name, views[id(one)]) for name, one in part.whole.named_parameters() if id(one) in views]
        for number, (name, one) in enumerate((*trained, *part.whole.named_buffers())):
            owner, tensor = 0 if is_all_of_0 else part.owner_of[name], described(name, one)
            if owner != part.worker:
                one.copy_(exchange.receive(owner, "final", number, tensor))
                continue
            for to in workers:
                if to != owner:
                    exchange.send(to, "final", number, one, tensor)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> bool:
        """As in `Worker`; a lost part is reported once the launcher, too, knows of it: connections break earlier."""
        run: Any = self._membership
        if (
            self._has_replicas
            and self._environment is not None
            and kind is not None
            and issubclass(kind, WorkerLostError)
        ):
            mates, until_s = run.arena.plan.seats.mates(run.worker_id), time.monotonic() + _NEWS_DEADLINE_S
            while not any(map(run.arena.has_ended, mates)) and time.monotonic() < until_s:
                time.sleep(_LOOK_EVERY_S)
        return super().__exit__(kind, *details)

    def _leave(self, *, failed: bool, is_cut: bool = False) -> None:
        super()._leave(failed=failed, is_cut=is_cut)
        environment, exchange = self._environment, self._exchange
        if exchange is None or exchange.recorder is None or failed:
            return
        if isinstance(environment, SupervisedEnvironment) and environment.checkpoint is not None:
            exchange.recorder.write(environment.checkpoint.parent, self._part.plan)

    def _restore(self, run: Membership) -> int:
        """Loads this part from all parts of the checkpoint; returns the batches that its workers had taken."""
        if self._resume is None:
            return super()._restore(run)
        if self._has_replicas:
            self._calls = _calls_of(checkpoint.load_program(self._resume, run.worker_id), self._resume)
            return super()._restore(run)
        taken, self._calls, self._saved = _load_part(self._resume, self._part, self._optimizer, run)
        return taken

    def _load_final(self, left: LeftWeights | None) -> None:
        super()._load_final(left)
        run: Any = self._membership
        if self._has_replicas and run.part is not None:
            run.make_whole(run.part)  # from the memory of all parts

    def _left_by_loop(self) -> LeftWeights | None:
        return None if self._has_replicas else super()._left_by_loop()

    def _own_state(self) -> dict[str, Any]:
        part = self._part
        if self._has_replicas:
            return {"calls": part.calls}
        names = {id(one): name for name, one in part.named_parameters()}
        trained = [names[id(one)] for group in self._optimizer.param_groups for one in group["params"]]
        values = {name: one.detach().clone() for name, one in (*part.named_parameters(), *part.named_buffers())}
        return {
            "placed": 1,
            "trained": trained,
            "values": values,
            "calls": part.calls,
            "options_began": self._options.began,
        }


def _check_gradients(noted: NotedGradients, optimizer: torch.optim.Optimizer, *_: object) -> None:
    if hasattr(optimizer, "found_inf") or noted.have_changed():
        raise UsageError(_CHANGED)


def _check(part: PlacedPart, environment: WorkerEnvironment | None, *, has_replicas: bool) -> None:
    plan = part.plan
    if environment is None:
        if plan.workers > 1:
            raise UsageError(
                f"This plan is for {plan.workers} workers: start them with paceline.launch(train, workers={plan.workers},"
                " plan=plan), torchrun, or paceline launch -- SCRIPT."
            )
        return
    if any(one.device.type != "cpu" for one in part.whole.parameters()):
        raise UsageError("Placed models train on the CPU: move the model there with model.cpu() before plan.part.")
    if not has_replicas:
        if isinstance(environment, Invitation) and part.joined is not None:
            return
        if isinstance(environment, LaunchedEnvironment) and part.worker == environment.worker_id:
            plan.check_workers(environment.num_workers)
            return
    if not isinstance(environment, SupervisedEnvironment) or environment.plan is None:
        raise UsageError(
            "Run the parts of a placed model with paceline.launch(train, workers=..., plan=plan), or, in a script under "
            "torchrun or paceline launch and without an algorithm, attach plan.part(model). They cannot be simulated."
        )
    if part.worker != environment.worker_id % plan.workers:
        raise UsageError(
            f"This is worker {part.worker}'s part of a plan, but it runs in worker {environment.worker_id} of a launch: call "
            "plan.part(model) in the function that it runs."
        )
    if environment.plan != plan:
        raise UsageError(
            "This part belongs to another plan than the launch's: give launch the same plan. A script that calls pl.place "
            'outside of `if __name__ == "__main__":` makes another plan in each worker.'
        )


def _check_named(algorithm: Algorithm, environment: WorkerEnvironment | None) -> None:
    check_replicas(algorithm)
    if environment is not None and environment.algorithm is None:
        raise UsageError(
            "The launcher must know how replicas of a placed model agree: name the algorithm in launch, not only in attach."
        )


def _calls_of(program: dict[str, Any] | None, resume: Path) -> int:
    """The forward passes that a worker had made; none if it is new to the run."""
    calls = program.get("calls") if program is not None else 0
    if type(calls) is not int or calls < 0:
        raise UsageError(_UNSOUND.format(resume))
    return calls


def _is_sound(program: dict[str, Any], part: PlacedPart) -> bool:
    """Whether a worker's part of a checkpoint holds this model's tensors by name, and valid counts."""
    values, trained, calls = program.get("values"), program.get("trained"), program.get("calls")
    began = program.get("options_began", [])
    if not (isinstance(values, dict) and isinstance(trained, list) and type(calls) is int and calls >= 0):
        return False
    if not (isinstance(began, list) and all(isinstance(one, dict) for one in began)):
        return False
    known = dict((*part.whole.named_parameters(), *part.whole.named_buffers())) | dict(part.named_parameters())
    return all(
        isinstance(one, torch.Tensor) and (name == "nothing" or (name in known and fits(one, known[name].data)))
        for name, one in values.items()
    )


def _settings(saved: dict[str, Any]) -> _Settings:
    """By parameter, its group's initial settings and those at the checkpoint; empty for checkpoints of earlier versions."""
    program, groups = saved["program"], saved["optimizer"]["param_groups"]
    names, found = iter(program["trained"]), _Settings()
    for began, group in zip(program.get("options_began", []), groups, strict=False):
        found |= {name: (began, group) for _, name in zip(group["params"], names, strict=False)}
    return found


def _load_part(
    resume: Path, part: PlacedPart, optimizer: torch.optim.Optimizer, run: Membership
) -> tuple[int, int, _Settings]:
    """Batches taken, forward passes made, and the settings of all parameters' groups."""
    values: dict[str, torch.Tensor] = {}
    settings: _Settings = {}
    states: dict[str, dict[str, Any]] = {}
    taken, calls = 0, 0
    for saved in checkpoint.load_workers(resume):
        program = saved.get("program") or {}
        if "placed" not in program:
            raise UsageError(
                f"The checkpoint in {resume} is of a run without a plan: resume a placed model from a placed run's "
                "checkpoint."
            )
        if not _is_sound(program, part):
            raise UsageError(_UNSOUND.format(resume))
        values |= program["values"]
        state = saved["optimizer"]["state"]
        states |= {name: state[at] for at, name in enumerate(program["trained"]) if at in state}
        settings |= _settings(saved)
        taken, calls = max(taken, saved["taken"]), max(calls, program["calls"])
    names = {id(one): name for name, one in part.named_parameters()}
    if missing := sorted(name for name in names.values() if name != "nothing" and name not in values):
        raise UsageError(
            f"The checkpoint in {resume} lacks {missing[0]} of this model, because a worker's part is missing: resume "
            "from another checkpoint, or start the run again without it."
        )
    views = dict(zip(map(id, run.binding.parameters), run.binding.views(run.ports.shared.x), strict=True))
    with torch.no_grad():
        for one, name in ((p, n) for n, p in part.named_parameters()):
            if name in values and id(one) in views:
                views[id(one)].copy_(values[name])
        for name, one in part.named_buffers():
            if name in values:
                one.copy_(values[name])
    order = [one for group in optimizer.param_groups for one in group["params"]]
    state = {at: states[names[id(one)]] for at, one in enumerate(order) if names[id(one)] in states}
    check_state(state, members_of(optimizer))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return taken, calls, settings
