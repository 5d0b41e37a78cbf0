"""Workers that join a run train in rounds, and go on without those that are killed or leave."""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leftovers
import paceline as pl
import paceline.membership.elastic
import soak_results
from chosen import each_value, soaked
from exact_codec import CODED, exact_codec  # noqa: F401
from paceline.membership.join_point import JoinPoint
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.message_newcomers import MessageNewcomers
from paceline.transport.round_header import Purpose
from paceline.transport.round_members import RoundMembers
from processes.join_programs import CONTEXT, DEADLINE_S, free_address
from processes.local_reference import (
    LATE,
    LOCAL,
    OUTER,
    STREAM,
    WHOLE,
    LocalReference,
    Training,
    coded,
    lives_of,
    steps_of,
)
from processes.survivors import EPOCHS, LET_IN_NEXT_EPOCH, Survivors, own_samples, samples

WORKERS = 3
METHODS = ["lockstep", "all-reduce", CODED]


@dataclass(frozen=True)
class Crew:
    """Workers that join one run.

    Args:
        program: of each.
        signals: by worker, the number of the message before which it sends itself a signal, and that signal.
        at_end: whether only messages after the loop count.
        fatal: by worker, the kind of a message to or from a newcomer before which it is killed, once.
        replacements: how many workers that end too early are replaced.
        num_not_let_in: how many of the replacements end without having taken part.
        silence_s: how long a worker that cannot be reached is waited for.
        min_workers: with fewer, the others wait for replacements.
        patience_s: how long.
    """

    program: Any
    signals: dict = field(default_factory=dict)
    silence_s: float = 40.0
    at_end: bool = False
    fatal: dict = field(default_factory=dict)
    replacements: int = 0
    num_not_let_in: int = 0
    min_workers: int = 1
    patience_s: float = 590.0

    def work(self, environment):
        """One worker."""
        os.environ.update(environment)
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)  # for a loader's processes, as in a script
        send, sent = MessageCollectives._send, itertools.count(1)
        answer, expected = MessageNewcomers._answer, MessageNewcomers.expected

        def counting(collectives, to, message):
            number, what = self.signals.get(collectives._worker_id, (0, None))
            if (not self.at_end or collectives.purpose is Purpose.END) and next(sent) == number:
                (self.program.folder / f"signal-{collectives._worker_id}").touch()
                os.kill(os.getpid(), what)
            send(collectives, to, message)

        def answering(newcomers, to, message):
            fatal = self.program.folder / f"fatal-{newcomers.collectives._worker_id}"
            if message.kind == self.fatal.get(newcomers.collectives._worker_id) and not fatal.exists():
                fatal.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            answer(newcomers, to, message)

        absent, misses = RoundMembers.absent, self.program.folder / f"misses-{os.getpid()}"

        def noting(members):
            if members._unreachable:
                misses.touch()
            return absent(members)

        MessageCollectives._send, RoundMembers.absent = counting, noting
        MessageNewcomers._answer = answering
        MessageNewcomers.expected = lambda newcomers, waited_s: expected(newcomers, waited_s + 590 - self.patience_s)
        paceline.membership.elastic._SILENCE_S = self.silence_s
        try:
            self.program()
        except Exception as error:
            (self.program.folder / f"error-{os.getpid()}").write_text(str(error))
            raise SystemExit(1) from None

    def run(self, workers=WORKERS, meanwhile=lambda processes: None):
        """Returns the exit codes of all, in no order."""
        environment = {"PACELINE_JOIN": free_address(), "PACELINE_OF": str(workers), "PACELINE_DEADLINE_S": "590"}
        environment["PACELINE_MIN_WORKERS"] = str(self.min_workers)
        processes = []

        def start():
            processes.append(CONTEXT.Process(target=self.work, args=(environment,)))
            processes[-1].start()

        def num_ended():
            return sum(one.exitcode not in (None, 0) for one in processes)

        with contextlib.closing(JoinPoint(environment["PACELINE_JOIN"], None, DEADLINE_S)):
            try:
                for _ in range(workers):
                    start()
                meanwhile(processes)
                for number in range(self.replacements):
                    leftovers.wait_until(lambda: num_ended() > number, "a worker dies", DEADLINE_S)  # noqa: B023
                    start()
                for one in processes:
                    one.join(DEADLINE_S)
                return sorted(one.exitcode for one in processes)
            finally:
                for one in processes:
                    one.kill()
                    one.join()

    def gone(self):
        """The signals that have ended workers, or stopped them so long that the others went on."""
        folder = self.program.folder
        came = {one: what for one, (_, what) in self.signals.items() if (folder / f"signal-{one}").exists()}
        return {one: what for one, what in came.items() if what != signal.SIGSTOP or [*folder.glob("error-*")]}

    def survivors(self, workers=WORKERS, **options):
        """Runs; returns the model of those that have trained to the end, the same for all."""
        codes, left = self.run(workers, **options), self.gone()
        deaths = sum(len(one) if isinstance(one, list) else 1 for one in self.program.kills.values())
        ends = [-signal.SIGKILL] * deaths + [1 if what == signal.SIGSTOP else -what for what in left.values()]
        ends += [1] * self.num_not_let_in
        assert codes == sorted(ends + [0] * (workers + self.replacements - len(ends)))
        lost = {*self.program.kills, *left} if not self.replacements else ()
        first, *others = self.program.models([one for one in range(workers) if one not in lost])
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)
        return first


def check(crew, workers=WORKERS, epochs=EPOCHS, num_missing=0, **options):
    """Survivors are as one process would have trained; each sample counts once an epoch, but for `num_missing` in one."""
    program, first = crew.program, crew.survivors(workers, **options)
    counted = program.counted(dict.fromkeys(range(workers), ()))
    for victim, what in crew.gone().items():  # its last step may not have come to the others, who make it again
        path = program.folder / f"steps-{victim}.jsonl"
        if what != signal.SIGTERM and path.exists():
            number, step = json.loads(path.read_text().splitlines()[-1])
            times = count(counted)
            if any(times[n] > epochs for n in own_samples(step[1])):
                counted[number].remove(step)
    # A round in which only workers had batches that died changes nothing.
    counted = {number: parts for number, parts in counted.items() if any(own_samples(part) for _, part in parts)}
    times = count(counted)
    assert Counter(times.values()) == Counter({epochs: len(times) - num_missing, epochs - 1: num_missing})
    assert len(times) == len(samples(program.num_batches)[0])
    for name, value in program.replayed(counted).items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


def count(counted):
    return Counter(n for parts in counted.values() for _, part in parts for n in own_samples(part))


@pytest.mark.parametrize("method", METHODS)
def test_without_deaths(method, tmp_path):
    check(Crew(Survivors(tmp_path, algorithm=method)))


@pytest.mark.parametrize(
    ("method", "kills"), each_value(METHODS, [{0: 1}, {0: 2, 2: 2}, {0: 1, 1: 3}, {1: 0}, {2: 3}]), ids=str
)
def test_whoever_dies_whenever(method, kills, tmp_path):
    """Worker 0, two at once, one after the other, in the first step, and in an epoch's last round."""
    check(Crew(Survivors(tmp_path, kills, method)))


@pytest.mark.parametrize("at", ["backward", "step"])
def test_dies_within_a_step(at, tmp_path):
    check(Crew(Survivors(tmp_path, {1: 2}, at=at)))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "algorithm": "lockstep"},
        {"clips": True},
        {"data": "processes"},
        {"sums": True},
        {"scales": True, "clips": True},
        {"ahead": True},
        {"twice": True},
        {"per_step": 2, "marks": True},
        {"per_step": 2, "algorithm": "lockstep"},
    ],
    ids=str,
)
def test_with(options, tmp_path):
    program = Survivors(tmp_path, {0: 2}, **options)
    check(Crew(program), epochs=EPOCHS * (1 + program.twice))


@pytest.mark.parametrize("number", [1, 4, 6, 15, *soaked(2, 5, 9)])
def test_is_killed_before_a_message(number, tmp_path):
    """In a round each worker sends the others pieces, results and votes; in some rounds they exchange reports, too."""
    check(Crew(Survivors(tmp_path, algorithm="lockstep"), {number % WORKERS: (number, signal.SIGKILL)}))


@pytest.mark.parametrize("number", [1, 6, 12])
def test_a_worker_that_is_told_to_end_makes_its_step_and_leaves(number, tmp_path):
    check(Crew(Survivors(tmp_path, algorithm="lockstep"), {number % WORKERS: (number, signal.SIGTERM)}))


@pytest.mark.parametrize(
    ("method", "kills"),
    each_value([STREAM, LOCAL, LATE, coded(STREAM)], [{1: 4}, {}, {0: 2, 2: 2}]),
    ids=lambda one: getattr(one, "spec", str(one)),
)
def test_methods_with_local_steps(method, kills, tmp_path):
    crew = Crew(Survivors(tmp_path, kills, method.spec))
    first = crew.survivors()
    reference = LocalReference(method, Training.of(crew.program), steps_of(tmp_path, WORKERS), kills)
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
    assert set(reference.counted.values()) == {EPOCHS}


def test_a_worker_dies_between_a_sum_and_the_end_of_an_average_under_way(tmp_path):
    crew = Crew(Survivors(tmp_path, {1: 2}, STREAM.spec, sums=True))
    first = crew.survivors()
    reference = LocalReference(STREAM, Training.of(crew.program), steps_of(tmp_path, WORKERS), {1: 2})
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("method", "worker"), each_value(METHODS, [0, 1, 2]))
def test_a_replacement_takes_the_dead_workers_place(method, worker, tmp_path):
    program = Survivors(tmp_path, {worker: 2}, method, optimizer="adam", newcomers={4: {worker: 1}}, num_batches=30)
    check(Crew(program, replacements=1))


@pytest.mark.parametrize(
    "options",
    [
        {"clips": True, "sums": True},
        {"num_batches": 10, "newcomers": {3: {1: 1}}, "epochs": 3},
        LET_IN_NEXT_EPOCH,
        {"schedule": "plateau"},
        {"data": "stream"},
        {"per_step": 2, "marks": True, "num_batches": 48},
        *soaked(
            {"data": "processes"},
            {"ahead": True},
            {"twice": True, "algorithm": "lockstep"},
            {"schedule": "epoch", "newcomers": {20: {1: 1}}},
            {"schedule": "follow"},
        ),
    ],
    ids=str,
)
def test_a_replacement_with(options, tmp_path):
    """`test_survivors.py` has all options on one machine, where a replacement gets the same state in another way."""
    options = {"newcomers": {4: {1: 1}}, "num_batches": 30} | options
    program = Survivors(tmp_path, {1: 2}, **options)
    num_missing = 4 if program.data == "stream" else 0  # of the batch with which the worker died
    check(Crew(program, replacements=1), epochs=program.epochs * (1 + program.twice), num_missing=num_missing)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("lockstep(shares=auto)", {}),
        ("all-reduce(shares=auto)", {"data": "drawn", "ahead": True}),
        *soaked(
            ("lockstep(shares=auto)", {"data": "drawn", "ahead": True}),
            ("lockstep(shares=auto)", {"data": "processes"}),
            ("all-reduce(shares=auto)", {}),
            ("all-reduce(shares=auto)", {"data": "processes"}),
        ),
    ],
    ids=str,
)
def test_a_replacement_knows_which_samples_batches_by_speed_have(method, options, tmp_path):
    options |= {"newcomers": {14: {1: 1}}, "num_batches": 100, "slow_s": 2e-3}
    check(Crew(Survivors(tmp_path, {1: 12}, method, **options), replacements=1))


@pytest.mark.parametrize(("method", "worker"), each_value(METHODS, [0, 2]))
def test_too_few_workers_wait_for_a_replacement(method, worker, tmp_path):
    """The step in which the worker died is made without it, and the next one by its replacement, too."""
    program = Survivors(tmp_path, {worker: 2}, method, optimizer="adam")
    check(Crew(program, replacements=1, min_workers=3))
    assert program.entered(worker)[1] == 4


@pytest.mark.parametrize("worker", [0, 1])
def test_too_few_workers_end_if_nobody_comes(worker, tmp_path):
    crew = Crew(Survivors(tmp_path, {worker: 2}), min_workers=3, patience_s=0.0)
    assert crew.run() == [-signal.SIGKILL, 1, 1]
    (said,) = {path.read_text() for path in tmp_path.glob("error-*")}
    assert said.startswith("Only 2 of 3 workers are left, fewer than min_workers=3, and no other replacement comes")


def check_local(method, crew, ended=(), **options):
    """As `check`, for methods with local steps; `ended`: workers whose last process was killed."""
    first = crew.survivors(**options)
    steps, lives = lives_of(crew.program, WORKERS, ended)
    reference = LocalReference(method, Training.of(crew.program), steps, {}, lives=lives)
    for name, value in reference.train().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)
    assert reference.counted == dict.fromkeys(range(len(samples(crew.program.num_batches)[0])), EPOCHS)


@pytest.mark.parametrize("method", [LOCAL, STREAM], ids=lambda one: one.spec)
def test_too_few_workers_with_local_steps_wait_for_a_replacement(method, tmp_path):
    check_local(method, Crew(Survivors(tmp_path, {1: 2}, method.spec), replacements=1, min_workers=3))


@pytest.mark.parametrize(
    ("method", "worker"), [(LOCAL, 0), (WHOLE, 1), (OUTER, 2), (STREAM, 0)], ids=lambda one: getattr(one, "spec", one)
)
def test_a_replacement_of_a_worker_with_local_steps(method, worker, tmp_path):
    kills, newcomers = {worker: 2}, {4: {worker: 1}}
    program = Survivors(tmp_path, kills, method.spec, optimizer="adam", newcomers=newcomers, num_batches=30)
    check_local(method, Crew(program, replacements=1))


def test_replacements_of_replacements_with_local_steps(tmp_path):
    kills, newcomers = {1: [2, 3], 0: 8}, {4: {1: 1}, 18: {1: 2}, 20: {0: 1}}
    program = Survivors(tmp_path, kills, STREAM.spec, newcomers=newcomers, num_batches=60, optimizer="adam")
    check_local(STREAM, Crew(program, replacements=3))


@pytest.mark.parametrize("at", ["newcomer yes", "newcomer state"])
def test_the_giver_dies_between_local_steps(at, tmp_path):
    kills, newcomers = {1: 2, 0: -1}, {4: {1: 1}, 14: {0: 1, 1: 2}}
    program = Survivors(tmp_path, kills, WHOLE.spec, newcomers=newcomers, num_batches=60)
    check_local(WHOLE, Crew(program, fatal={0: at}, replacements=3, num_not_let_in=1))


@pytest.mark.parametrize(
    ("fatal", "kills", "last"),
    [({2: "newcomer yes"}, {1: 2, 2: -1}, {2: 1}), ({1: "round ask"}, {1: [2, -1]}, {1: 2})],
    ids=str,
)
def test_another_worker_or_a_replacement_dies_between_local_steps(fatal, kills, last, tmp_path):
    program = Survivors(tmp_path, kills, WHOLE.spec, newcomers={4: {1: 1}, 14: last}, num_batches=60)
    check_local(WHOLE, Crew(program, fatal=fatal, replacements=2))


def test_replacements_of_replacements(tmp_path):
    program = Survivors(
        tmp_path, {1: [2, 3], 0: 8}, newcomers={4: {1: 1}, 14: {1: 2}, 16: {0: 1}}, num_batches=60, optimizer="adam"
    )
    check(Crew(program, replacements=3))


def test_a_replacement_joins_a_worker_that_is_alone(tmp_path):
    program = Survivors(tmp_path, {1: 2}, newcomers={4: {1: 1}}, num_batches=30)
    check(Crew(program, replacements=1), workers=2)


@pytest.mark.parametrize("at", ["newcomer yes", "newcomer state"])
def test_a_worker_that_dies_as_it_gives_its_state_is_replaced_like_the_one_that_waits_for_it(at, tmp_path):
    program = Survivors(tmp_path, {1: 2, 0: -1}, newcomers={4: {1: 1}, 10: {0: 1, 1: 2}}, num_batches=60)
    check(Crew(program, fatal={0: at}, replacements=3, num_not_let_in=1))


@pytest.mark.parametrize(
    ("fatal", "kills", "last"),
    [({2: "newcomer yes"}, {1: 2, 2: -1}, {2: 1}), ({1: "round ask"}, {1: [2, -1]}, {1: 2})],
    ids=str,
)
def test_another_worker_or_a_replacement_dies_as_one_comes(fatal, kills, last, tmp_path):
    program = Survivors(tmp_path, kills, newcomers={4: {1: 1}, 10: last}, num_batches=60)
    check(Crew(program, fatal=fatal, replacements=2))


@pytest.mark.parametrize(
    ("options", "why"), [({"scales": True}, "GradScaler"), ({"schedule": "own"}, "own count of steps")]
)
def test_a_replacement_that_cannot_take_part_leaves(options, why, tmp_path):
    """Because it cannot have the others' scale; or its learning rates differ, which shows in its third round."""
    program = Survivors(tmp_path, {1: 2}, newcomers={9: {1: 1}}, num_batches=40, **options)
    assert Crew(program, replacements=1).run() == [-signal.SIGKILL, 0, 0, 1]
    (error,) = [path.read_text() for path in tmp_path.glob("error-*")]
    assert why in error
    first, other = program.models([0, 2])
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("number", [2, 4, 6])
def test_a_worker_that_stands_still_is_waited_for(number, tmp_path):
    """Until the others cannot reach it any more: once it goes on, what was on its way is sent again."""

    def wake(processes):
        leftovers.wait_until(lambda: len(list(tmp_path.glob("misses-*"))) == WORKERS - 1, "the others miss it")
        for one in processes:
            os.kill(one.pid, signal.SIGCONT)

    check(Crew(Survivors(tmp_path, algorithm="lockstep"), {1: (number, signal.SIGSTOP)}, 4.0), meanwhile=wake)
    assert not [*tmp_path.glob("error-*")]


@pytest.mark.parametrize(("victim", "number"), [(0, 4), (1, 5)])
def test_the_others_go_on_without_a_worker_that_stands_still_for_long(victim, number, tmp_path):
    """It ends with an error once it wakes, although the others, which it cannot reach, have ended by then."""

    def wake(processes):
        leftovers.wait_until(lambda: sum(one.exitcode == 0 for one in processes) == WORKERS - 1, "the others end")
        for one in processes:
            if one.exitcode is None:
                os.kill(one.pid, signal.SIGCONT)

    check(Crew(Survivors(tmp_path, algorithm="lockstep"), {victim: (number, signal.SIGSTOP)}, 3.0), meanwhile=wake)
    (error,) = [path.read_text() for path in tmp_path.glob("error-*")]
    assert re.match(r"round \d+: workers \d and \d could not be reached for 3 s", error)


@dataclass(frozen=True)
class Loop:
    """A loop whose workers do not all do the same, or load weights at its end."""

    folder: Path
    kind: str
    kills: dict = field(default_factory=dict)

    def __call__(self):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with pl.attach(net, optimizer, algorithm="all-reduce") as worker:
            for _ in range(1 if (self.kind, worker.worker_id) == ("ends early", 1) else 2):
                for x in worker.batches([torch.ones(4, 3)] * 6):
                    optimizer.zero_grad()
                    net(x).square().mean().backward()
                    optimizer.step()
                if (self.kind, worker.worker_id) == ("sums alone", 0):
                    worker.sum(1)
            if self.kind == "loads":
                net.load_state_dict(
                    {name: torch.full_like(x, 3 + worker.worker_id) for name, x in net.state_dict().items()}
                )
        torch.save(net.state_dict(), self.folder / f"model-{worker.worker_id}.pt")

    def models(self, workers):
        return [torch.load(self.folder / f"model-{worker}.pt") for worker in workers]


@pytest.mark.parametrize("number", [1, 6, 7, 12, *soaked(4, 9, 11)])
def test_worker_0_dies_after_all_have_loaded_weights(number, tmp_path):
    """All have its weights, or, if these cannot have come to all, those of the next worker."""
    model = Crew(Loop(tmp_path, "loads"), {0: (number, signal.SIGKILL)}, at_end=True).survivors()
    (value,) = {number for x in model.values() for number in x.flatten().tolist()}
    assert value in ((4,) if number <= 6 else (3, 4))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ends early", "worker 1 is at the end of its loop, and not at a step as worker"),
        ("sums alone", "worker 0 is at worker.sum or worker.mean, and not at a step as worker"),
    ],
)
def test_workers_that_do_not_do_the_same(kind, says, tmp_path):
    """Each says what it finds: that the others are elsewhere, or that these have ended for that reason."""
    assert Crew(Loop(tmp_path, kind)).run() == [1] * WORKERS
    told = [path.read_text() for path in tmp_path.glob("error-*")]
    assert any(says in one for one in told), told
    assert all(" is at " in one or "had left its loop, by an error" in one for one in told), told


def test_a_loop_that_ends_with_an_error_ends_the_others(tmp_path):
    """They do not go on silently without it."""
    assert Crew(Survivors(tmp_path, fails={1: 2})).run() == [1] * WORKERS
    own, *others = sorted(path.read_text() for path in tmp_path.glob("error-*"))
    assert own == "'label 17'"
    assert all("worker 1 had left its loop, by an error (see its output)" in one for one in others)
    assert len(others) == WORKERS - 1


def drawn(number, folder):
    """A method, a loop and its workers, some of which get a signal at drawn messages."""
    draws = random.Random(f"rounds {number}")
    workers = draws.choice([2, 3, 4])
    victims = draws.sample(range(workers), draws.randrange(1, workers))
    what = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]
    together = draws.randrange(1, 40)
    at = {one: together if draws.random() < 0.3 else draws.randrange(1, 60) for one in victims}
    signals = {one: (number, draws.choice(what)) for one, number in at.items()}
    optimizer = draws.choice(["sgd", "adam"])
    return Crew(Survivors(folder, algorithm="lockstep", optimizer=optimizer), signals), workers


@pytest.mark.soak
def test_a_hundred_runs_in_which_workers_die_and_leave(tmp_path):
    """Writes what became of them to PACELINE_SOAK_RESULTS."""
    deaths = leaves = 0
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        crew, workers = drawn(number, folder)
        check(crew, workers)
        ends = list(crew.gone().values())
        deaths, leaves = deaths + ends.count(signal.SIGKILL), leaves + ends.count(signal.SIGTERM)
    soak_results.keep("soak_join_rounds", "lockstep", {"runs": 100, "deaths": deaths, "left": leaves})
