"""The four studies of `thesis.py` as tables: their settings, their rows, and what the rows say about what is published."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from thesis_model import CPP, FIRST_TOUCH, INTERLEAVED, LEASHED, LOCKS, METHODS, PLACEMENTS, TORCH, UMA, Runs, law

GRADIENTS, LONG_GRADIENTS, EPSILON_BATCH = 1500, 5000, 128
STUDIES: dict[str, dict[str, Sequence[Any]]] = {
    "memory": {"workers": (16, 36, 68), "batch_size": (16, 512, None), "placement": tuple(PLACEMENTS)},
    "batch_and_step": {
        "workers": (1, 8, 34, 68),
        "batch_size": (16, 128),
        "learning_rate": (0.05, 0.2, 0.8, 3.2, 12.8),
    },
    "time_to_epsilon": {"setting": ((34, 0.02), (68, 0.02), (68, 0.01))},
    "bandwidth": {"batch_size": (16, EPSILON_BATCH), "bandwidth": (1, 10)},
    "staleness": {"workers": (2, 8, 34, 68), "batch_size": (16, 64, 512), "code": (CPP, TORCH)},
    "backoff": {"workers": (34, 68), "batch_size": (16, 512), "backoff": ("none", "constant", "linear", "exponential")},
}
TOLERANCE = 1e-9
DROPPING = ("leashed, T_p = 1", "leashed, T_p = 0")

TWO_SOCKETS = "Two sockets are faster than one where memory binds"
TWO_SOCKETS_BATCH = "Two sockets are faster than one at the papers' batch 512, with no more workers than one has cores"
BY_CONSTRUCTION = "by construction"  # the model could not show anything else
MORE_WORKERS, LARGER_STEPS = "More runs fail with more workers", "More runs fail with larger steps"
SOONER = "Leashed is 20 % to 4 times sooner at epsilon, with many workers"
GROWS = "Staleness grows with parallelism"
FALLS_AFTER = "Staleness falls with batch size: what is gathered after the gradient"
FALLS_MEAN = "Staleness falls with batch size: all of it"
NEAR_LAW, BOUND = "Contention is near n*", "A finite persistence bound lowers contention and staleness"
BACKOFF_LEASHED, BACKOFF_LOCKS = "Back-off helps a crowded leashed", "Back-off helps crowded locks"


@dataclass
class Study:
    """Lines of a report, and which claims the figures bear out: a name, whether it holds, and the figures in words."""

    lines: list[str] = field(default_factory=list)
    claims: list[tuple[str, bool | str | None, str]] = field(default_factory=list)

    def table(self, heads: Iterable[str]) -> None:
        """Begins a table."""
        names = list(heads)
        self.lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]

    def row(self, *cells: object) -> None:
        """Adds a row, and prints it: the studies take minutes."""
        self.lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
        print(self.lines[-1], flush=True)

    def claim(self, name: str, holds: bool | str | None, says: str) -> None:
        """Adds a claim; None: it holds in part; or `BY_CONSTRUCTION`."""
        self.claims.append((name, holds, says))


def memory(runs: Runs) -> Study:
    """(i) Updates per second by placement, timing only."""
    study, found = Study(), {}
    factors = STUDIES["memory"]
    study.table(["gradient", "workers", "placement", *METHODS])
    for batch_size in factors["batch_size"]:
        label = "only reads memory" if batch_size is None else f"batch {batch_size}"
        for workers in factors["workers"]:
            for placement in factors["placement"]:
                if placement == UMA and workers > 36:
                    continue  # more than the socket's threads
                for name, algorithm in METHODS.items():
                    run = runs.timed(algorithm, workers, batch_size, placement=placement)
                    found[batch_size, workers, placement, name] = run["updates_per_s"]
                rates = [f"{found[batch_size, workers, placement, name]:,.0f}" for name in METHODS]
                study.row(label, workers, placement, *rates)
    for what, names in (("locks", LOCKS), ("lock-free methods", ("Hogwild!", *LEASHED))):
        ratios = {
            name: found[None, workers, INTERLEAVED, name] / found[None, workers, UMA, name]
            for workers in (16, 36)
            for name in names
        }
        papers = {name: (found[512, 16, INTERLEAVED, name], found[512, 16, UMA, name]) for name in names}
        says = (
            f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times the updates on 16 and 36 workers that only"
        )
        says += " read memory; at the papers' batch 512, 16 workers, updates per second on two sockets against one: "
        says += ", ".join(f"{two:,.0f} against {one:,.0f} ({name})" for name, (two, one) in papers.items())
        study.claim(f"{TWO_SOCKETS}: {what}", BY_CONSTRUCTION, says)
        gains = [two / one for two, one in papers.values()]
        says = f"{min(gains):.2f} to {max(gains):.2f} times the updates on 16 workers"
        study.claim(f"{TWO_SOCKETS_BATCH}: {what}", min(gains) > 1.1, says)
    slower = [
        f"{name} at batch {batch_size}, {workers} workers ({ratio:.2f})"
        for batch_size in (16, 512)
        for workers in (16, 36)
        for name in METHODS
        if (ratio := found[batch_size, workers, INTERLEAVED, name] / found[batch_size, workers, UMA, name]) < 0.99
    ]
    study.lines += ["", f"Slower on two sockets, interleaved, than on one: {'; '.join(slower) or 'none'}."]
    first = [
        found[16, 68, FIRST_TOUCH, name] / found[16, 68, INTERLEAVED, name] for name in ("mutex", "rwlock", "Hogwild!")
    ]
    study.lines += [
        f"First touch against interleaving, 68 workers, batch 16: {', '.join(f'{one:.2f}' for one in first)} times the updates"
        " (mutex, rwlock, Hogwild!)."
    ]
    return study


def batch_and_step(runs: Runs) -> Study:
    """(ii) What becomes of training, by batch, step size and workers; real gradients."""
    study = Study()
    factors = STUDIES["batch_and_step"]
    outcomes: dict[tuple[int, int, float, str], str] = {}
    rates = factors["learning_rate"]
    study.lines += [
        "",
        f"Real gradients of digits-mlp in the MLP's times, {GRADIENTS} in total, one seed: after how many updates the running"
        " loss is at 5 % of the initial one; or where it ends: not there, or worse than at the start; crashed: not finite.",
    ]
    study.table(["batch", "workers", "method", *(f"step size {rate:g}" for rate in rates)])
    for batch_size in factors["batch_size"]:
        for workers in factors["workers"]:
            for name, algorithm in METHODS.items():
                if workers == 1 and name != "mutex":
                    continue  # a lone worker does the same under each
                cells = []
                for rate in rates:
                    run = runs.trained(algorithm, workers, batch_size, rate, gradients=GRADIENTS)
                    cells.append(_outcome(run))
                    outcomes[batch_size, workers, rate, name] = cells[-1].partition(" ")[0]
                study.row(batch_size, workers, "any" if workers == 1 else name, *cells)

    def shares(of: str, by: int, values: Sequence[Any]) -> list[float]:
        parts = []
        for value in values:
            some = [outcome for key, outcome in outcomes.items() if key[by] == value]
            parts.append(sum(outcome in of.split() for outcome in some) / len(some))
        return parts

    for claim, by, values in ((MORE_WORKERS, 1, factors["workers"]), (LARGER_STEPS, 2, rates)):
        failed, broken = shares("not worse crashed", by, values), shares("worse crashed", by, values)
        says = ", ".join(
            f"{value:g}: {100 * a:.0f} % ({100 * b:.0f} %)" for value, a, b in zip(values, failed, broken, strict=True)
        )
        grows = [_grows(one) and one[-1] > one[0] for one in (failed, broken)]
        holds = True if all(grows) else None if any(grows) else False
        study.claim(
            claim, holds, f"not at 5 % of the initial loss (of these worse than at the start, or crashed): {says}"
        )
    return study


def time_to_epsilon(runs: Runs) -> Study:
    """Seconds of the simulated machine to fractions of the initial loss; real gradients."""
    study, seconds = Study(), {}
    fractions = ("0.5", "0.25", "0.1", "0.05")
    heads = [f"to {100 * float(one):g} %" for one in fractions]
    study.lines += [
        "",
        f"Seconds of the simulated machine until the running loss is at such a part of the initial one; batch {EPSILON_BATCH},"
        f" real gradients as above, {LONG_GRADIENTS} in total, one seed; never: not within these.",
    ]
    study.table(["workers", "step size", "method", *heads, "updates per s", "mean staleness", "median"])
    for workers, rate in STUDIES["time_to_epsilon"]["setting"]:
        for name, algorithm in METHODS.items():
            run = runs.trained(algorithm, workers, EPSILON_BATCH, rate, gradients=LONG_GRADIENTS)
            times_s = run["time_to_fraction_s"]
            seconds[workers, rate, name] = times_s
            cells = ["never" if times_s[one] is None else f"{times_s[one]:.2f} s" for one in fractions]
            rows = (f"{run['updates_per_s']:.0f}", f"{run['staleness_mean']:.1f}", f"{run['staleness_p50']:.0f}")
            study.row(workers, rate, name, *cells, *rows)
    for others, label in ((LOCKS, "locks"), (("Hogwild!",), "Hogwild!")):
        said, sooner = [], []
        for workers, rate in STUDIES["time_to_epsilon"]["setting"]:
            ratios = []
            for fraction in fractions:
                theirs, ours = (_soonest(seconds, workers, rate, names, fraction) for names in (others, LEASHED))
                ratios.append("neither" if theirs == ours else f"{theirs / ours:.2f}" if ours < math.inf else "never")
                sooner.append(theirs >= 1.2 * ours and ours < math.inf)
            said.append(f"{workers} workers, {rate:g}: {', '.join(ratios)}".replace("inf", "they never"))
        holds = True if all(sooner) else None if any(sooner) else False
        says = f"its best bound at 50, 25, 10, 5 % of the initial loss, times as soon: {'; '.join(said)}"
        study.claim(f"{SOONER}: than {label}", holds, says)
    return study


def bandwidth(runs: Runs) -> Study:
    """What the assumption that vectors come from memory does to updates per second on 68 workers; timing only."""
    study, said = Study(), []
    factors = STUDIES["bandwidth"]
    study.table(["batch", "bandwidth of the memories", *METHODS])
    for batch_size in factors["batch_size"]:
        for times in factors["bandwidth"]:
            found = [runs.timed(algorithm, 68, batch_size, bandwidth=times) for algorithm in METHODS.values()]
            rates = dict(zip(METHODS, (one["updates_per_s"] for one in found), strict=True))
            study.row(batch_size, f"{times} x", *(f"{rate:,.0f}" for rate in rates.values()))
        ratios = ", ".join(f"{rates['leashed, T_p = inf'] / rates[name]:.2f} times the {name}'s" for name in LOCKS)
        said.append(f"{ratios} updates at batch {batch_size}")
    study.lines += ["", f"With ten times as much, unbounded leashed makes {'; '.join(said)}."]
    return study


def staleness(runs: Runs) -> Study:
    """(iii) Staleness and contention; timing only."""
    study = Study()
    factors = STUDIES["staleness"]
    found: dict[tuple[str, int, int, str], dict[str, Any]] = {}
    for code in factors["code"]:
        study.lines += [
            "",
            f"{code.name}: mean staleness, of it after the gradient was ready; 95th percentile, highest.",
        ]
        study.table(["batch", "workers", *METHODS])
        for batch_size in factors["batch_size"]:
            for workers in factors["workers"]:
                cells = []
                for name, algorithm in METHODS.items():
                    run = runs.timed(algorithm, workers, batch_size, code=code)
                    found[code.name, batch_size, workers, name] = run
                    tau, after = run["staleness_mean"], run["staleness_mean_after_gradient"]
                    cells.append(f"{tau:.1f}, {after:.1f}; {run['staleness_p95']}, {run['staleness_max']}")
                study.row(batch_size, workers, *cells)
    grows, dropping, after, means, tails = [], [], [], [], []
    for code in factors["code"]:
        for name in METHODS:
            for batch_size in factors["batch_size"]:
                column = [found[code.name, batch_size, workers, name] for workers in factors["workers"]]
                (dropping if name in DROPPING else grows).append(_grows([one["staleness_mean"] for one in column]))
            for workers in factors["workers"][1:]:
                row = [found[code.name, batch_size, workers, name] for batch_size in factors["batch_size"]]
                after.append(_grows([-one["staleness_mean_after_gradient"] for one in row]))
                if name in ("Hogwild!", "leashed, T_p = inf"):
                    means.append(row[0]["staleness_mean"] > 1.02 * row[-1]["staleness_mean"])
                    tails.append(row[0]["staleness_max"] > row[-1]["staleness_max"])
    says = f"the mean does in {sum(grows)} of {len(grows)} columns where nothing is dropped, with a bound in"
    study.claim(GROWS, all(grows), f"{says} {sum(dropping)} of {len(dropping)}")
    study.claim(FALLS_AFTER, all(after), f"in {sum(after)} of {len(after)} series of three batch sizes")
    says = f"of methods that never wait and drop nothing the mean does in {sum(means)} of {len(means)} series, the highest in"
    study.claim(FALLS_MEAN, all(means), f"{says} {sum(tails)}")
    _contention(study, found)
    return study


def _contention(study: Study, found: dict[tuple[str, int, int, str], dict[str, Any]]) -> None:
    study.lines += [
        "",
        "Workers that publish at an instant (n), next to n* = m / (T_c / T_u + 1), T_u alone on the machine; in brackets"
        " the share of gradients dropped.",
    ]
    study.table(["code", "batch", "workers", "n*", *LEASHED])
    errors, retried, ordered, dropped = [], [], [], []
    for (code_name, batch_size, workers, name), _ in found.items():
        if name != LEASHED[0]:
            continue
        code = CPP if code_name == CPP.name else TORCH
        here = [found[code_name, batch_size, workers, bound] for bound in LEASHED]
        expected = law(workers, here[-1]["gradient_s"], code)
        cells = [
            f"{one['publishing']:.2f} ({100 * one['dropped_updates'] / one['computed_gradients']:.0f} %)"
            for one in here
        ]
        study.row(code_name, batch_size, workers, f"{expected:.2f}", *cells)
        contention = [one["publishing"] for one in here]
        if expected <= 3.0:
            errors.append(contention[-1] / expected)
        if expected <= 0.5:
            retried.append(contention[0] / expected)
        if workers > 2:
            ordered.append(_grows([-one for one in contention]))
            dropped.append(_grows([-one["staleness_mean"] for one in here]))
    says = f"with one attempt n is {min(errors):.2f} to {max(errors):.2f} times n* in {len(errors)} settings with n* up to 3"
    says += f"; with unbounded retries {min(retried):.2f} to {max(retried):.2f} times where n* is up to 0.5"
    study.claim(NEAR_LAW, min(errors) >= 0.8 and max(errors) <= 1.25, says)
    says = f"n falls from T_p = inf to 1 to 0 in {sum(ordered)} of {len(ordered)} settings, mean staleness in {sum(dropped)}"
    study.claim(BOUND, True if all(ordered) and all(dropped) else None if all(ordered) else False, says)


def backoff(runs: Runs) -> Study:
    """(iv) Back-off on locks and on leashed; timing only."""
    study, found = Study(), {}
    factors = STUDIES["backoff"]
    study.lines += ["", "Updates per second; lost publishes per update; mean staleness."]
    study.table(["batch", "workers", "method", *factors["backoff"]])
    for batch_size in factors["batch_size"]:
        for workers in factors["workers"]:
            for name, algorithm in METHODS.items():
                can = name not in ("Hogwild!", "leashed, T_p = 0")  # these never try again
                cells = []
                for wait in factors["backoff"]:
                    if wait != "none" and not can:
                        cells.append("")
                        continue
                    run = runs.timed(_with_backoff(algorithm, wait), workers, batch_size)
                    found[batch_size, workers, name, wait] = run
                    lost = run["failed_publishes"] / max(1, run["steps"])
                    cells.append(f"{run['updates_per_s']:,.0f}; {lost:.2f}; {run['staleness_mean']:.1f}")
                study.row(batch_size, workers, name, *cells)
    for name in ("mutex", "rwlock", "leashed, T_p = inf", "leashed, T_p = 1"):
        said = []
        for batch_size in factors["batch_size"]:
            rates = {
                wait: found[batch_size, 68, name, wait]["updates_per_s"]
                / found[batch_size, 68, name, "none"]["updates_per_s"]
                for wait in factors["backoff"][1:]
            }
            said.append(f"batch {batch_size}: " + ", ".join(f"{wait} {ratio:.2f}" for wait, ratio in rates.items()))
        study.lines += ["", f"{name}, 68 workers, times the updates without back-off: {'; '.join(said)}."]
    for claim, names in ((BACKOFF_LEASHED, ("leashed, T_p = inf", "leashed, T_p = 1")), (BACKOFF_LOCKS, LOCKS)):
        gains = {name: [_gain(found, name, wait) for wait in factors["backoff"][1:]] for name in names}
        says = "; ".join(f"{name} {min(one):.2f} to {max(one):.2f}" for name, one in gains.items())
        helps = min(min(one) for one in gains.values()) > 1
        study.claim(claim, helps, f"batch 16, 68 workers, times the updates: {says}")
    return study


def _gain(found: dict[Any, dict[str, Any]], name: str, wait: str) -> float:
    return found[16, 68, name, wait]["updates_per_s"] / found[16, 68, name, "none"]["updates_per_s"]


def _with_backoff(algorithm: str, wait: str) -> str:
    if wait == "none":
        return algorithm
    name, bracket, rest = algorithm.partition("(")
    return f"{name}({rest.removesuffix(')')}{',' if bracket else ''}backoff={wait})"


def _outcome(run: dict[str, Any]) -> str:
    """In the table: reached and when; not; worse than at the start; crashed."""
    if run["outcome"] in ("diverged", "crashed"):
        return f"crashed at {run['steps']}"
    if run["outcome"] == "converged":
        return f"reached in {run['steps']}"
    loss, start = run["train_loss"], run["initial_loss"]
    return f"worse ({loss:.3g})" if loss is None or loss > 1.02 * start else f"not ({loss:.2f})"


def _soonest(seconds: dict[Any, Any], workers: int, rate: float, names: Sequence[str], fraction: str) -> float:
    times_s = (seconds[workers, rate, name][fraction] for name in names)
    return min((one for one in times_s if one is not None), default=math.inf)


def _grows(values: Sequence[float]) -> bool:
    return all(b >= a - TOLERANCE for a, b in pairwise(values))
