"""`paceline calibrate` under a launcher: all workers measure, worker 0 gathers.

The steps of all workers come first, at the same time; then memory, by one worker of each machine; then links, pair by pair
in rounds in which each machine has at most one pair. Messages use the training mailbox, encrypted between machines.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from paceline.advice.calibration import probes
from paceline.advice.calibration.cluster_file import MeasuredCluster, MeasuredWorker
from paceline.advice.calibration.codecs import measure_codecs
from paceline.advice.calibration.gather import WorkerGroup, read
from paceline.advice.calibration.machine import measure_link, measure_memory, measure_steps
from paceline.advice.calibration.measurements import QUICK, Effort, Quartiles
from paceline.advice.calibration.rounds import link_rounds, sample
from paceline.errors import PeerLostError, UsageError, WorkerLostError
from paceline.membership.elastic import num_places
from paceline.membership.environment import Invitation, LaunchedEnvironment, WorkerEnvironment
from paceline.membership.join_point import JoinPoint
from paceline.membership.rendezvous import address_of, common_store, machine_of_this, own_part
from paceline.ports.ports import Received
from paceline.system.machine import machine, num_cores
from paceline.tasks.load import load_task
from paceline.transport.mailbox import ZmqMailbox

_MOST_ROUNDS = 64
_MOST_STEPS_SENT = 2000
_LOOK_EVERY_S = 2.0
_ANSWER_S = 600.0  # minimum time to wait for slow steps; a worker's death is noticed at once
_LINK = Effort(repeats=50, large_repeats=6, large_bytes=(250_000, 1_000_000, 4_000_000))
_QUICK_LINK = Effort(repeats=20, large_repeats=4, large_bytes=(250_000, 1_000_000))


@contextlib.contextmanager
def meet_others(environment: WorkerEnvironment) -> Iterator[WorkerGroup]:
    """Connects to all other workers of the launcher that started this one.

    Raises:
        WorkerLostError: a worker did not arrive within the environment's deadline; the message names it.
    """
    assert isinstance(environment, Invitation | LaunchedEnvironment)
    with contextlib.ExitStack() as stack:
        if isinstance(environment, Invitation):
            point = JoinPoint(environment.address, environment.key, environment.deadline_s)
            store, host, key = stack.enter_context(contextlib.closing(point)), point.host, point.key
            worker_id, num_workers = _join(point, environment)
        else:
            point, worker_id, num_workers = None, environment.worker_id, environment.num_workers
            store, host, key = _rendezvous(environment)
        mailbox = stack.enter_context(ZmqMailbox(store, worker_id, num_workers, host=host, keys=key))
        _connect(mailbox, point, num_workers, environment.deadline_s)
        yield WorkerGroup(mailbox, worker_id, num_workers, max(_ANSWER_S, environment.deadline_s))


def _rendezvous(environment: LaunchedEnvironment) -> tuple[Any, str | None, Path | None]:
    """The store of a worker that torchrun or a similar launcher has numbered, its address, and the key file."""
    try:
        store = own_part(common_store(environment, "run `paceline calibrate`"), "calibrate")
        return store, *address_of(store, environment.worker_id, environment.num_workers, environment.deadline_s)
    except RuntimeError as error:
        if isinstance(error, WorkerLostError):
            raise
        raise WorkerLostError("start: worker 0, which hosts the rendezvous store, has ended; see its output.") from None


def _join(join_point: JoinPoint, invitation: Invitation) -> tuple[int, int]:
    """The number that a worker gets at the join point, and how many workers there are."""
    num_workers = num_places(join_point, invitation.of, own=1)
    if join_point.agree_words("hello", {"algorithm": "calibrate"}).get("algorithm") != "calibrate":
        raise UsageError(
            f"Workers of a training run meet at {invitation.address}: choose another port for the calibration."
        )
    worker_id = join_point.add("calibrating", 1) - 1
    if not 0 <= worker_id < num_workers:
        raise UsageError(
            f"All {num_workers} places at {invitation.address} are taken: choose another port, or start with a higher --of."
        )
    return worker_id, num_workers


def _connect(mailbox: ZmqMailbox, join_point: JoinPoint | None, num_workers: int, deadline_s: float) -> None:
    until_s = time.monotonic() + deadline_s
    while True:
        left_s = until_s - time.monotonic()
        try:
            mailbox.connect(max(0.0, min(_LOOK_EVERY_S, left_s)))
            return
        except WorkerLostError as error:
            if join_point is not None and join_point.lost:
                raise WorkerLostError("The join point ended before all workers had joined: start them again.") from None
            if left_s <= _LOOK_EVERY_S:
                named = str(error).partition(" s ")[2]
                raise WorkerLostError(f"After {deadline_s:g} s {named} All {num_workers} workers are needed.") from None


def measure_together(
    group: WorkerGroup,
    task_reference: str = "digits-mlp",
    *,
    batch_size: int | None = None,
    data: Path | None = None,
    quick: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> MeasuredCluster | None:
    """The measurements of all workers of `group` on worker 0, None on the others. Arguments as for `calibration.measure`.

    Takes as long as `calibration.measure` plus at most about a minute for links, of which at most 64 evenly spaced rounds of
    pairs are measured.

    Raises:
        UsageError: no such task or data on a worker, a batch larger than the data set, or workers with different
            arguments.
        WorkerLostError: a worker left, or did not answer; the message names it.
    """
    effort = QUICK if quick else Effort()
    worker_id = group.worker_id
    task = load_task(task_reference)
    group.what = "loading the data"
    on_progress(f"{task.name}: loading")
    train_set, _ = task.load(data)
    asked = f"{task.name}, batches of {batch_size or task.batch_size}{', --quick' if quick else ''}"
    hellos = group.gather([machine_of_this(), asked], _greeting)
    machines = group.tell(_machines(hellos), partial(_machine_numbers, group.num_workers))

    group.what = "measuring steps"
    steps = measure_steps(task, train_set, batch_size, effort, on_progress)
    group.meet()  # until all workers have stopped computing

    group.what = "measuring memory"
    memory, codecs = None, {}
    if machines.index(machines[worker_id]) == worker_id:
        on_progress("memory")
        with probes.ProcessTeam(max(2, num_cores())) as team:
            memory = measure_memory(team, steps.vector_bytes, effort, lambda _: None)
        on_progress("codecs")
        codecs = measure_codecs(effort.codec_s)
    group.meet()

    group.what = "measuring links"
    mine = MeasuredWorker(
        machine=machines[worker_id],
        host=platform.node(),
        about=machine(),
        compute_s={size: Quartiles.of(times_s) for size, times_s in steps.compute_s.items()},
        steps_s=steps.compute_s[steps.batch_size][:_MOST_STEPS_SENT].tolist(),
        update_s=Quartiles.of(steps.update_s),
        memory=memory,
        codecs=codecs,
        round_trips_s=_link_trips_s(group, machines, _QUICK_LINK if quick else _LINK, on_progress),
    )
    workers = group.gather(asdict(mine), lambda worker, said: read(MeasuredWorker, said).checked(worker, machines))
    return MeasuredCluster(steps.task, steps.batch_size, steps.vector_bytes, workers) if worker_id == 0 else None


def _greeting(_: int, said: Any) -> list[str]:
    its_machine, asked = read(list[str], said)
    return [its_machine, asked]


def _machine_numbers(num_workers: int, _: int, said: Any) -> list[int]:
    numbers = read(list[int], said)
    if len(numbers) != num_workers or not all(0 <= one < num_workers for one in numbers):
        raise ValueError(f"{numbers} as the machines of {num_workers} workers")
    return numbers


def _machines(hellos: list[list[str]]) -> list[int]:
    """Each worker's machine, numbered in worker order; empty on workers other than 0."""
    numbers: dict[str, int] = {}
    for worker, (its_machine, asked) in enumerate(hellos):
        if asked != hellos[0][1]:
            raise UsageError(
                f"The workers were started with different options: worker 0 measures {hellos[0][1]}, worker {worker} "
                f"{asked}. Start all with the same options."
            )
        numbers.setdefault(its_machine, len(numbers))
    return [numbers[its_machine] for its_machine, _ in hellos]


def _link_trips_s(
    group: WorkerGroup, machines: list[int], effort: Effort, on_progress: Callable[[str], None]
) -> dict[int, dict[int, list[float]]]:
    """Round trips by peer and message bytes; the worker with the lower number measures a link."""
    found = {}
    rounds = sample(link_rounds(machines), _MOST_ROUNDS)
    for number, pairs in enumerate(rounds):
        group.meet()
        on_progress(f"links, round {number + 1} of {len(rounds)}")
        for a, b in pairs:
            if group.worker_id == a:
                with _named(group):
                    found[b] = measure_link(group.mailbox, b, effort)
                    group.mailbox.send(b, probes.ENOUGH)
            elif group.worker_id == b:
                with _named(group):
                    _echo(group, a)
    return found


@contextlib.contextmanager
def _named(group: WorkerGroup) -> Iterator[None]:
    try:
        yield
    except PeerLostError as error:
        raise group.lost(error.peer, str(error).partition(": ")[2].rstrip(".")) from None


def _echo(group: WorkerGroup, peer: int) -> None:
    """Returns messages until the peer has measured its link."""
    kinds = ("there", probes.ENOUGH.kind)
    while isinstance(received := group.mailbox.receive(group.deadline_s, sender=peer, kind=kinds), Received):
        if received.message.kind == probes.ENOUGH.kind:
            return
        group.mailbox.send(peer, received.message)
    raise PeerLostError(
        peer, "it sent nothing more" if received is None else getattr(received, "reason", "it came back")
    )
