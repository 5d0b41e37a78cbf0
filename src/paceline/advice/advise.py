"""`advise`: finds the algorithm and number of workers that reach a target soonest, by short runs, simulations and models."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.advice.answer import Advice, Candidate, Circumstances, Fit, Prediction, Target
from paceline.advice.campaign import Budget, Campaign
from paceline.advice.candidates import ALONE, candidates
from paceline.advice.failures import CHECKPOINT_EVERY_S, restarts, with_kills
from paceline.advice.pool import Pool
from paceline.advice.prediction import Predictor, convergence_models, order
from paceline.advice.program import Program, Shape
from paceline.advice.programs import LoopProgram, load_program
from paceline.advice.scratch import Scratch, WritesElsewhereError
from paceline.advice.short_runs import ShortRuns, designed
from paceline.advice.simulations import this_machine
from paceline.advice.words import cautions, how_sure, name, nothing_arrives
from paceline.errors import PacelineError, UsageError
from paceline.planner.convergence_model import ConvergenceModel
from paceline.planner.estimate import LogSpread
from paceline.simulator import Cluster
from paceline.system.limits import temporary_folder
from paceline.system.machine import machine, num_cores
from paceline.tasks.base import keep_data

_RUN_S = 2.0  # of a short run, at most
_LEAST_RUN_S = 0.4
_SETUP_S = 1.5  # of a run; a guess
_REAL, _SCREENED, _MEASURED_AGAIN, _SIMULATED = 0.3, 0.72, 0.82, 0.95  # shares of the budget at which phases end
_FIRST_RUNS = 0.5  # share of the budget after which no first run begins, if the machine is slower than guessed
_SEEDS = 3
_RESTART_S = 5.0  # of a worker, if no run has measured it


def advise(
    program: Program | str,
    *,
    target: Target,
    max_workers: int,
    circumstances: Circumstances | None = None,
    algorithms: Sequence[str] | None = None,
    budget_s: float = 300.0,
    data: Path | None = None,
    seed: int = 0,
    processes: int | None = None,
    log: Path | None = None,
    writes_elsewhere: bool = False,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> Advice:
    """Compares algorithms and numbers of workers by when they will reach a target.

    Uses all cores for about the budget. Makes short real runs of every algorithm (not with a cluster file), simulates every
    candidate with real gradients, and repeats the simulations of the best ones. The recommended candidate has been
    simulated to the target, not trained.

    Args:
        program: `FILE.py:FUNCTION` that calls `paceline.attach`, a built-in task, or a `Program`.
        target: a loss or an accuracy; with a deadline, candidates that meet it rank first, the others by their value then.
        max_workers: largest number of workers to consider.
        circumstances: slow workers, kills, other machines.
        algorithms: specs; None: those in `candidates.py`.
        budget_s: wall time.
        data: folder with a task's data; None: the folder in PACELINE_DATA.
        seed: of the first run or simulation; further ones count up from it.
        processes: number of simulations at a time; None: one per core; 0: in this process.
        log: file for the output of a user's loop; None: it is discarded.
        writes_elsewhere: whether a user's loop may write to absolute paths outside its scratch folder.
        on_progress: called with the current activity and the share of the budget spent.

    Raises:
        UsageError: no candidate can run, the budget is too small, or the loop would write outside its scratch folder.
        PacelineError: a run or a process failed in a way that concerns all candidates.
    """
    circumstances = circumstances or Circumstances()
    given = Cluster.load(circumstances.cluster) if circumstances.cluster is not None else None
    parent = temporary_folder()
    with tempfile.TemporaryDirectory(prefix="paceline-", dir=parent, ignore_cleanup_errors=True) as folder:
        place = Path(os.devnull) if log is None else log.absolute()
        scratch = Scratch(Path(folder), Path.cwd(), place, writes_elsewhere)
        loaded = load_program(program, scratch, data) if isinstance(program, str) else program
        budget = Budget(total_s=budget_s)
        return _Advising(
            loaded, target, circumstances, given, max_workers, algorithms, budget, seed,
            num_cores() if processes is None else processes, on_progress,
        ).advice()  # fmt: skip


def _tried(program: LoopProgram) -> tuple[Shape | None, str]:
    """The loop's shape, from its first step, or why the loop must not run; its short runs report other errors."""
    try:
        return program.shape(), ""
    except WritesElsewhereError as error:
        return None, str(error)
    except PacelineError:
        return None, ""


@dataclass
class _Advising:
    program: Program
    target: Target
    circumstances: Circumstances
    given: Cluster | None
    max_workers: int
    algorithms: Sequence[str] | None
    budget: Budget
    seed: int
    processes: int
    on_progress: Callable[[str, float], None]

    def __post_init__(self) -> None:
        given, max_workers = self.given, self.max_workers
        one_machine = given is None or given.cores is not None or given.sockets is not None
        self.candidates, self.not_tried = candidates(max_workers, self.algorithms, one_machine=one_machine)
        slowness = given.slowness if given is not None else ()
        self.slow = {worker: factor for worker, factor in slowness if worker < max_workers} | self.circumstances.slow
        self.warnings: list[str] = []
        self._shape: Shape | None = None
        self.trials = ShortRuns(self.program, self.target, self.slow)
        self.measures = given is None

    def advice(self) -> Advice:
        with keep_data(), Pool(self.processes) as pool:
            self._first_step(pool)
            if self.measures:
                self._measure(self._algorithms_to_run())
                self._without_runs()
            campaign = self._campaign(pool)
            campaign.screen(self.candidates, _SCREENED)
            campaign.longer(_SIMULATED)
            # Repeats at other times show how much the machine varies.
            for candidate in 2 * campaign.leaders() if self.measures else ():
                if self.budget.spent <= _MEASURED_AGAIN:
                    self._run(candidate, self.seed + 1, again=" again")
            campaign.again(_SEEDS, _SIMULATED)
            self._say("Fitting models")
            models = convergence_models(campaign)
        return self._answer(campaign, models)

    def _first_step(self, pool: Pool) -> None:
        """Makes one step of a user's loop in another process, to see where it writes, before any run."""
        if not isinstance(self.program, LoopProgram):
            return
        self._say("Checking where the loop writes")
        ends = (self.budget.at(_SIMULATED), self.budget.at(1.0))
        for found in pool.map(_tried, [self.program], begin_until_s=ends[0], end_until_s=ends[1]):
            self._shape, why = found or (None, "")
            if why:
                raise UsageError(why)

    def _say(self, what: str) -> None:
        self.on_progress(what, min(0.99, self.budget.spent))

    # Short real runs

    def _algorithms_to_run(self) -> list[Candidate]:
        """One worker; then every algorithm with the most workers; then with the most informative numbers of workers."""
        alone = Candidate(algorithm=ALONE, workers=1)
        by_algorithm: dict[str, list[int]] = {}
        for one in self.candidates:
            if one.workers > 1:
                by_algorithm.setdefault(one.algorithm, []).append(one.workers)
        first = [alone, *(Candidate(algorithm=one, workers=max(of)) for one, of in by_algorithm.items())]
        each_s = _RUN_S + _SETUP_S
        if len(first) * (_LEAST_RUN_S + _SETUP_S) > self.budget.total_s * _SCREENED:
            least = len(first) * (_LEAST_RUN_S + _SETUP_S) / _SCREENED
            raise UsageError(
                f"A budget of {self.budget.total_s:g} s is too small for {len(first)} short runs: give {least:.0f} s or more,"
                " or fewer algorithms."
            )
        left_s = self.budget.total_s * _REAL - len(first) * each_s
        number = 1 + max(0, int(left_s / each_s / max(1, len(by_algorithm))))
        further = [
            Candidate(algorithm=one, workers=m)
            for one, of in by_algorithm.items()
            for m in designed(of, number)
            if m != max(of)
        ]
        self._first = len(first)
        return first + further

    def _measure(self, wanted: Sequence[Candidate]) -> None:
        for_s = self.budget.total_s * _REAL / self._first - _SETUP_S
        self._for_s = min(_RUN_S, max(_LEAST_RUN_S, for_s))
        for number, candidate in enumerate(wanted):
            if number and self.budget.spent > (_FIRST_RUNS if number < self._first else _REAL):
                return
            self._run(candidate, self.seed)

    def _run(self, candidate: Candidate, seed: int, again: str = "") -> None:
        self._say(f"Running {name(candidate)}{again} for {self._for_s:.1f} s")
        self.trials.make(candidate, for_s=self._for_s, seed=seed)

    def _without_runs(self) -> None:
        have = {one.algorithm for one in self.trials.runs}
        gone: dict[str, str] = {}
        for one, why in self.trials.failed.items():
            if one.algorithm not in have:
                gone.setdefault(one.algorithm, why)
        late = dict.fromkeys(one.algorithm for one in self.candidates if one.algorithm not in have | gone.keys())
        self.not_tried += [f"{one}: {why}." for one, why in gone.items()]
        if late:
            self.not_tried.append(f"{', '.join(late)}: the budget was spent before their short runs.")
        here = [one for one in self.trials.failed if one.algorithm in have and one in self.candidates]
        self.not_tried += [f"{name(one)}: {self.trials.failed[one]}." for one in here]
        self.candidates = [one for one in self.candidates if one.algorithm in have and one not in here]
        if not self.candidates:
            whys = "; ".join(dict.fromkeys(gone.values()))
            raise UsageError(f"No algorithm could be run here: {whys or 'the budget was spent before any had'}.")

    # Simulations

    def _campaign(self, pool: Pool) -> Campaign:
        shape = self._shape or self.program.shape()
        if self.given is not None:
            cluster = self.given
        else:
            cluster, said = this_machine(self.program.name, shape, self._say)
            self.warnings += said
        return Campaign(
            program=self.program,
            target=self.target,
            cluster=cluster,
            shape=shape,
            slow=self.slow,
            trials=self.trials if self.measures else None,
            pool=pool,
            budget=self.budget,
            seed=self.seed,
            on_progress=lambda what, share: self.on_progress(what, min(0.99, share)),
        )

    # The answer

    def _answer(self, campaign: Campaign, models: dict[str, ConvergenceModel]) -> Advice:
        predictor = Predictor(campaign=campaign, models=models)
        restart_s = self.trials.setup_s or _RESTART_S
        kills = {"kills_per_s": self.circumstances.kills_per_s, "restart_s": restart_s}
        ranked = order((with_kills(predictor.predict(one), **kills) for one in self.candidates), self.target)
        fits = tuple(
            Fit(
                algorithm=algorithm,
                leave_one_out={m: error / math.log(10) for m, error in model.leave_one_out.items()},
                step_error=self.trials.step_error(algorithm),
            )
            for algorithm, model in models.items()
        )
        if arrives := bool(ranked) and ranked[0].arrives:
            said = how_sure(ranked[0], predictor.progress, predictor.seeds)
            self._warn(ranked, predictor.seeds, restart_s)
        else:
            said = nothing_arrives(ranked, self.target)
        self.on_progress("Done", 1.0)
        return Advice(
            program=self.program.name,
            target=self.target,
            circumstances=self.circumstances,
            ranked=ranked,
            measured=self.trials.measured(),
            fits=fits,
            reasons=(said,),
            not_tried=tuple(self._left_out(campaign)),
            warnings=tuple(self.warnings),
            command=self._command(ranked[0]) if arrives else "",
            took_s=self.budget.spent * self.budget.total_s,
            machine=machine(),
        )

    def _command(self, best: Prediction) -> str:
        samples = best.samples_to_target
        most = math.inf if samples is None else samples.high if math.isfinite(samples.high) else 2 * samples.value
        return self.program.command(
            best.candidate,
            self.target,
            # The cluster file's slow workers need no option: they are slow by themselves.
            slow={one: factor for one, factor in self.circumstances.slow.items() if one < best.candidate.workers},
            restarts=restarts(best, self.circumstances.kills_per_s),
            samples=most,
        )

    def _warn(self, ranked: Sequence[Prediction], seeds: LogSpread | None, restart_s: float) -> None:
        best, said = ranked[0], self.warnings
        said += cautions(ranked)
        if seeds is None:
            said.append("No candidate reached the target with two seeds, so the spread between seeds is assumed.")
        gone = sum(not math.isfinite(time_s) for time_s in best.simulated_s)
        if gone and best.time_s is not None:
            said.append(
                f"{gone} of {len(best.simulated_s)} simulations of the best candidate did not reach the target."
            )
        if self.circumstances.kills_per_s:
            said.append(
                f"The cost of kills is computed, not simulated: a restart takes {restart_s:.1f} s, and a method that cannot"
                f" continue without the worker resumes from a checkpoint, one every {CHECKPOINT_EVERY_S:g} s. It loses more"
                " if an epoch takes longer than that."
            )
            if self.target.deadline_s is not None:
                said.append("Only times to the target include kills; values at the deadline do not.")

    def _left_out(self, campaign: Campaign) -> list[str]:
        said = list(self.not_tried)
        if not self.measures:
            said.append(f"No real runs were made: speeds are from {self.circumstances.cluster}.")
        if campaign.skipped:
            said.append(f"Not simulated, because the budget was spent: {', '.join(map(name, campaign.skipped))}.")
        said.append("Other batch sizes, learning rates and optimizers, which may change the order.")
        return said
