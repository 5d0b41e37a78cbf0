"""DQ-SGD: its rule for bits against the numerical optimum, and what runs on AG News and CIFAR-10 lose with so many bits.

PACELINE_DATA=FOLDER python benchmarks/fidelity/dq_sgd.py [--write] [--runs FILE.jsonl]

With `--runs`, runs that are in the file are not made again, and the others are added to it; equal runs have equal results.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from coded_problems import PROBLEMS, Data, Problem
from page import show
from torch import nn

import paceline as pl
from paceline.compression.bits_rule import Budget, error_of
from paceline.compression.registry import codec_registry
from paceline.compression.top_k import TopK

sys.path.append(str(Path(__file__).parents[1]))
import protocol

# The rule

T = 200
ALPHAS = (1.0, 0.99)
BITS = (3.0, 4.0, 6.0)
WITHIN = 0.01
LEAST_DIFFERENCE = 0.0005  # of excesses that are told apart, as the table rounds them
SIZES: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # log2 of the gradient's norm at step t of T
    "constant": lambda t: np.zeros(len(t)),
    "falls to a tenth": lambda t: -math.log2(10) * t / len(t),
    "falls by half twice": lambda t: -np.floor(3 * t / len(t)),
    "warm-up": lambda t: np.minimum(0.0, 4 * t / len(t) - 2),
    "swings": lambda t: 2 * np.sin(t / 8),
}


def weights(name: str, alpha: float) -> np.ndarray:
    """log2(alpha^((T - t) / 2) |g_t|) of every step."""
    t = np.arange(T)
    return SIZES[name](t) + 0.5 * (T - t) * math.log2(alpha)


def needed_bits(log2_sizes: np.ndarray, error: float) -> float:
    """Least mean bits of real levels whose errors add up to that: each step's condition, solved by bisection.

    With w = 4^size / 4 the error is w / s^2 and the bits log2(s + 1) + 1, so that 2 w (s + 1) / s^3 is the same of all steps.
    """

    def log2_levels(log2_price: float) -> np.ndarray:
        low, high = np.full(len(log2_sizes), -40.0), np.full(len(log2_sizes), 60.0)
        for _ in range(90):
            u = (low + high) / 2
            gain = 2 * log2_sizes - 1 + np.log2(1 + 2.0**-u) - 2 * u  # log2 of 2 w (s + 1) / s^3, with s = 2^u
            low, high = np.where(gain > log2_price, u, low), np.where(gain > log2_price, high, u)
        return (low + high) / 2

    low, high = -200.0, 200.0
    for _ in range(90):
        price = (low + high) / 2
        if total_error(list(log2_sizes), list(log2_levels(price))) > error:
            high = price
        else:
            low = price
    return float(np.mean(np.log2(2.0 ** log2_levels(low) + 1) + 1))


def best_whole(log2_sizes: np.ndarray, total_bits: int, least: int = 2, most: int = 8) -> float:
    """Least sum of errors with whole bits: bit by bit, where it takes away most; which is best, as errors are convex."""
    bits = np.full(len(log2_sizes), least)

    def error(of: np.ndarray) -> np.ndarray:
        return 4.0**log2_sizes / (4.0 * (2.0 ** (of - 1) - 1) ** 2)

    for _ in range(total_bits - int(bits.sum())):
        gain = np.where(bits < most, error(bits) - error(np.minimum(most, bits + 1)), -1.0)
        bits[int(np.argmax(gain))] += 1
    return float(error(bits).sum())


def factor_for_budget(log2_sizes: Sequence[float], target_bits: float) -> float:
    """log2(K) of levels K alpha^((T - t) / 2) |g_t| with so many bits log2(s + 1) + 1 on average."""
    low, high = -64.0 - max(log2_sizes), 64.0 - min(log2_sizes)
    for _ in range(60):
        factor = (low + high) / 2
        if np.mean(np.log2(2.0 ** (factor + np.asarray(log2_sizes)) + 1) + 1) > target_bits:
            high = factor
        else:
            low = factor
    return (low + high) / 2


def total_error(log2_sizes: Sequence[float], log2_levels: Sequence[float]) -> float:
    """The sum of weighted error bounds of steps rounded to so many levels."""
    return sum(4.0 ** (size - levels) / 4 for size, levels in zip(log2_sizes, log2_levels, strict=True))


def by_rule(log2_sizes: np.ndarray, target_bits: float) -> float:
    """The sum of errors of DQ-SGD's rule with so many bits on average."""
    factor = factor_for_budget(list(log2_sizes), target_bits)
    return total_error(list(log2_sizes), [factor + size for size in log2_sizes])


@dataclass(frozen=True)
class Taken:
    """Of `dq`, which knows no later step and gives whole bits, over so many steps.

    Args:
        bits: their mean.
        fixed: the sum of errors over that of fixed bits, real numbers of levels, of the same mean.
        best: the same, of the best whole bits of the same sum, if all gradients were known beforehand.
        excess: their mean over the least mean with which as large a sum of errors can be had.
    """

    bits: float
    fixed: float
    best: float
    excess: float


def step_by_step(norms: np.ndarray, target_bits: float, alpha: float, *, known: bool = False) -> Taken:
    """What `dq` makes of gradients of these norms; `known`: each is known before its bits are chosen, as at a server."""
    steps = len(norms)
    budget = Budget(target_bits, 2, 8, alpha, steps)
    bits = []
    for size in (4.0**norms).tolist():
        bits.append(budget.choose(size) if known else budget.choose())
        budget.account(size, bits[-1])
    log2_sizes = norms + 0.5 * (steps - np.arange(steps)) * math.log2(alpha)
    error = sum(4.0**size * error_of(one) for size, one in zip(log2_sizes, bits, strict=True))
    fixed = total_error(list(log2_sizes), [math.log2(2.0 ** (float(np.mean(bits)) - 1) - 1)] * steps)
    spent = float(np.mean(bits))
    return Taken(
        spent, error / fixed, best_whole(log2_sizes, sum(bits)) / fixed, spent / needed_bits(log2_sizes, error)
    )


def misweighted(log2_sizes: np.ndarray, target_bits: float, share: float) -> float:
    """A control: bits that follow `share` times the logarithm of the gradient, as 0 does, which is fixed bits, and 2."""
    scaled = share * log2_sizes
    factor = factor_for_budget(list(scaled), target_bits)
    return total_error(list(log2_sizes), [factor + size for size in scaled])


def rule_rows() -> list[str]:
    """Bits over the least that the same errors need: of the rule, of what `dq` makes of it, and of the controls."""
    lines = [
        "| norm of the gradient | alpha | bits | rule | `dq` | fixed bits (control) | bits by the squared norm (control) |",
        "|---" * 7 + "|",
    ]
    worst, apart, more, cells = 0.0, {0.0: 0.0, 2.0: 0.0}, Counter[str](), Counter[str]()
    for name in SIZES:
        for alpha in ALPHAS:
            for target in BITS:
                sizes = weights(name, alpha)
                rule = target / needed_bits(sizes, by_rule(sizes, target))
                assert 1 - 1e-6 <= rule <= 1 + WITHIN, (name, alpha, target, rule)
                worst = max(worst, rule)
                others = {share: target / needed_bits(sizes, misweighted(sizes, target, share)) for share in apart}
                own = step_by_step(SIZES[name](np.arange(T)), target, alpha).excess
                cells[name] += 1
                more[name] += own > others[0.0] + LEAST_DIFFERENCE
                if np.ptp(sizes) > 1:
                    assert min(others.values()) > 1 + WITHIN, ("a control is as good", name, alpha, target, others)
                    apart = {share: max(apart[share], others[share]) for share in apart}
                lines.append(
                    f"| {name} | {alpha} | {target:.0f} | {rule:.4f} | {own:.3f} | {others[0.0]:.3f} |"
                    f" {others[2.0]:.3f} |"
                )
    return [
        *lines,
        "",
        f"The rule takes at most {worst - 1:.2%} more than the least bits. The controls must take more than {WITHIN:.0%} more"
        " wherever the weighted norm changes by more than a factor of 2; they take up to"
        f" {apart[0.0] - 1:.0%} and {apart[2.0] - 1:.0%} more. `dq` knows no later step and gives whole bits: it takes more"
        f" bits for its errors than fixed bits do for theirs in {sum(more.values())} of {sum(cells.values())} rows"
        f" ({', '.join(f'{name}: {more[name]} of {cells[name]}' for name in cells)}).",
    ]


LONG = 1000  # steps
NOT_WORSE = 1.05  # times the errors of fixed bits


def step_rows() -> list[str]:
    """Errors of `dq` over those of fixed bits."""
    lines = [
        "| norm of the gradient | alpha | mean bits | the best whole bits | `dq` | `dq` at a server |",
        "|---" * 6 + "|",
    ]
    for name in SIZES:
        norms = SIZES[name](np.arange(LONG))
        for alpha in (1.0, 0.998):
            made, served = (step_by_step(norms, 4.0, alpha, known=known) for known in (False, True))
            assert alpha < 1 or max(made.fixed, served.fixed) <= NOT_WORSE, (name, made, served)
            assert max(abs(one.bits - 4) for one in (made, served)) <= 0.08, (name, made, served)
            lines.append(
                f"| {name} | {alpha} | {made.bits:.2f} | {made.best:.2f} | {made.fixed:.2f} | {served.fixed:.2f} |"
            )
    return [
        *lines,
        "",
        f"With alpha 1 no row may be above {NOT_WORSE:g}. A fall is not expected to go on: of two gradients that fall"
        " alike, one may settle at the next step, and bits spent before it are missing after it. So where norms only rise or"
        " fall `dq` is `qsgd`; it gains where they come back, and where `alpha` says beforehand what steps weigh. Then a"
        " sudden fall that nothing announces can make it worse.",
    ]


# The runs

ABOUT = (
    "The rule is within a hundredth of the least bits. `dq`, which knows no later step, is not: it gains where norms come"
    " back, is `qsgd` where they only rise or fall, and can be worse than fixed bits where `alpha` is below 1 (first table, in"
    " one unit). The runs do not show a gain of `dq`, whose bits equal the target's in every step there. They are too short to"
    " tell most codecs from float32:"
)
NOT_COMMITTED = (
    "All methods have float32's rate, halved, so a difference of `sign` or `top-k` is one of step sizes, too. Workers that"
    " never communicate and one worker alone were not run. The raw runs are not in the repository, so this page cannot be"
    " recomputed without new ones."
)
WORKERS, DROP_AT, DROP_BY = 4, 0.7, 0.1
SEEDS = (0, 1, 2)
RATE_SEED = 3  # of the runs that the rate is chosen by
EVALUATED_AT_ONCE = 500  # samples
STUDENT = 4.303  # 97.5 % of Student's t with two degrees of freedom
PLAIN = "all-reduce"
FIXED = tuple(f"all-reduce(codec=qsgd(bits={bits}))" for bits in range(2, 9))
METHODS = (
    PLAIN, "all-reduce(codec=fp16)", *FIXED, "all-reduce(codec=dq(target_bits=3))", "all-reduce(codec=dq(target_bits=4))",
    "all-reduce(codec=ternary(clip=2.5))", "all-reduce(codec=sign)", "all-reduce(codec=power(rank=4))",
    "parameter-server(mode=sync,codec=top-k(fraction=0.01))",
)  # fmt: skip
COARSE = "all-reduce(codec=qsgd(bits=2,norm=l2,bucket=none))"
FORGETFUL = METHODS[-1].replace("top-k", "forgetful")
CONTROLS = {COARSE: PLAIN, FORGETFUL: METHODS[-1]}  # whom each must be worse than


class Forgetful(TopK):
    """`top-k` without error feedback: what is not sent is lost."""

    def encode(self, gradient: torch.Tensor, memory: torch.Tensor | None, key: int = 0) -> torch.Tensor:
        """As if nothing had been kept back."""
        assert memory is not None
        return super().encode(gradient, memory.zero_(), key)


codec_registry.register("forgetful", Forgetful)


@dataclass(frozen=True)
class Found:
    """Of one run: bits that an element took in a step, loss over training samples, accuracy over all test samples."""

    bits: float
    loss: float
    accuracy: float


def train(problem: Problem, algorithm: str, data: Data, seed: int, rate: float) -> Found:
    """One run of four simulated workers; equal seeds have equal beginnings and batches."""
    draws = torch.Generator().manual_seed(seed)
    drawn = problem.steps * WORKERS * problem.batch
    order = torch.cat([torch.randperm(len(data.x), generator=draws) for _ in range(1 + drawn // len(data.x))])
    batches = [(data.x[at], data.y[at]) for at in order[:drawn].split(problem.batch)]
    models: list[nn.Module] = []

    def loop() -> None:
        torch.manual_seed(seed)
        model = problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with pl.attach(model, optimizer) as worker:
            for step, (inputs, labels) in enumerate(worker.batches(batches)):
                if step == int(DROP_AT * problem.steps):
                    optimizer.param_groups[0]["lr"] = rate * DROP_BY
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        models.append(model)

    result = pl.simulate(loop, workers=WORKERS, algorithm=algorithm, seed=seed).result
    if result["outcome"] == "diverged":
        return Found(result["bits_per_element"] or 32.0, math.inf, 1 / len(data.y.unique()))
    loss, _ = evaluated(models[0], data.x[:: problem.loss_of_each], data.y[:: problem.loss_of_each])
    _, accuracy = evaluated(models[0], data.test_x, data.test_y)
    return Found(result["bits_per_element"] or 32.0, loss, accuracy)


def evaluated(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Mean loss, and the share of the samples whose class is found."""
    loss = right = 0.0
    with torch.no_grad():
        for inputs, labels in zip(x.split(EVALUATED_AT_ONCE), y.split(EVALUATED_AT_ONCE), strict=True):
            outputs = model(inputs)
            loss += float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))
            right += float((outputs.argmax(1) == labels).sum())
    return loss / len(y), right / len(y)


def made(problem: Problem, algorithm: str, data: Data, seed: int, rate: float, file: Path | None) -> Found:
    """One run; where a file is given, as it is there, or added to it."""
    about = {
        "problem": problem.name, "batch": problem.batch, "steps": problem.steps, "rate": rate, "algorithm": algorithm,
        "seed": seed,
    }  # fmt: skip
    for known in protocol.read(file) if file is not None else ():
        if {name: known.get(name) for name in about} == about:
            return Found(**known["found"])
    found = train(problem, algorithm, data, seed, rate)
    record = {**about, "found": asdict(found)}
    print(record, file=sys.stderr, flush=True)
    if file is not None:
        protocol.append(file, record)
    return found


def interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The mean of paired differences, and half the width of its 95 % interval; (inf, 0) where one has diverged."""
    if not all(math.isfinite(one) for one in ones):
        return math.inf, 0.0
    pairs = [one - other for one, other in zip(ones, others, strict=True)]
    return statistics.fmean(pairs), STUDENT * statistics.stdev(pairs) / math.sqrt(len(pairs))


def losses(runs: Sequence[Found]) -> list[float]:
    """Their losses."""
    return [one.loss for one in runs]


def accuracies(runs: Sequence[Found]) -> list[float]:
    """Their accuracies."""
    return [one.accuracy for one in runs]


def compared(found: dict[str, list[Found]], one: str, other: str) -> str:
    """A sentence on two methods."""
    mean, half = interval(losses(found[one]), losses(found[other]))
    if math.isinf(mean):
        times = sum(math.isinf(run.loss) for run in found[one])
        return f"- `{one}` diverges in {times} of {len(found[one])} runs, `{other}` in none."
    said = "no difference is seen" if abs(mean) <= half else "more" if mean > 0 else "less"
    bits = [statistics.fmean(run.bits for run in found[name]) for name in (one, other)]
    return (
        f"- `{one}` at {bits[0]:.2f} bits against `{other}` at {bits[1]:.2f}: {mean:+.4f} ± {half:.4f} in loss: {said}."
    )


def chosen_rate(problem: Problem, data: Data, file: Path | None) -> float:
    """Half of the rate with which float32 ends at the least loss, so that coded gradients need not be at their limit."""
    ends = {rate: made(problem, PLAIN, data, RATE_SEED, rate, file).loss for rate in problem.rates}
    best = min(ends, key=lambda rate: ends[rate] if math.isfinite(ends[rate]) else math.inf)
    assert problem.rates[0] < best < problem.rates[-1], (
        "the best rate may be outside of those tried",
        problem.name,
        ends,
    )
    return best / 2


def task_rows(found: dict[str, list[Found]], problem: Problem) -> list[str]:
    """Every method's bits, loss and accuracy, and how these differ from float32's."""
    lines = [
        "| method | bits per element and step | Mbit of a worker | training loss | minus float32's |"
        " test accuracy | minus float32's |",
        "|---" * 7 + "|",
    ]
    sent = problem.num_parameters * problem.steps / 1e6
    for name, runs in found.items():
        bits = statistics.fmean(one.bits for one in runs)
        loss, loss_half = interval(losses(runs), losses(found[PLAIN]))
        if math.isinf(loss):
            lines.append(
                f"| `{name}`{' (control)' if name in CONTROLS else ''} | {bits:.2f} | {bits * sent:,.0f} | diverges | | | |"
            )
            continue
        accuracy, accuracy_half = interval(accuracies(runs), accuracies(found[PLAIN]))
        differ = (
            ("", "") if name == PLAIN else (f"{loss:+.4f} ± {loss_half:.4f}", f"{accuracy:+.2%} ± {accuracy_half:.2%}")
        )
        lines.append(
            f"| `{name}`{' (control)' if name in CONTROLS else ''} | {bits:.2f} | {bits * sent:,.0f} |"
            f" {statistics.fmean(losses(runs)):.4f} | {differ[0]} | {statistics.fmean(accuracies(runs)):.2%} | {differ[1]} |"
        )
    return lines


def findings(found: dict[str, list[Found]]) -> list[str]:
    """Sentences of the figures, and the controls."""
    told = [name for name in FIXED if (one := interval(losses(found[name]), losses(found[PLAIN])))[0] <= one[1]]
    lines = [f"- The coarsest fixed bits whose loss is not told from float32's: `{told[0]}`."] if told else []
    lines += [compared(found, f"all-reduce(codec=dq(target_bits={bits}))", FIXED[bits - 2]) for bits in (3, 4)]
    lines += [compared(found, FIXED[bits - 2], PLAIN) for bits in (2, 4, 8)]
    lines += [compared(found, METHODS[-1], PLAIN), compared(found, "all-reduce(codec=sign)", PLAIN)]
    lines += ["", "The controls must lose, with an interval that is all above 0:", ""]
    for control, other in CONTROLS.items():
        mean, half = interval(losses(found[control]), losses(found[other]))
        assert mean > half, ("the task cannot tell a control", control, mean, half)
        lines.append(compared(found, control, other))
    return lines


def problem_lines(problem: Problem, data: Data, file: Path | None) -> tuple[str, list[str]]:
    """What the page says first of a problem, and its section: all runs are made that are not in the file."""
    rate = chosen_rate(problem, data, file)
    found = {name: [made(problem, name, data, seed, rate, file) for seed in SEEDS] for name in (*METHODS, *CONTROLS)}
    passes = problem.steps * WORKERS * problem.batch / len(data.x)
    measured = len(data.x[:: problem.loss_of_each])
    told = [name for name in FIXED if (one := interval(losses(found[name]), losses(found[PLAIN])))[0] <= one[1]]
    first = (
        f"{problem.name} ends at {statistics.fmean(accuracies(found[PLAIN])):.1%} with float32, and does not tell {len(told)}"
        f" of {len(FIXED)} fixed numbers of bits from it"
    )
    return first, [
        "",
        f"## {problem.name}",
        "",
        f"{len(data.x):,} {problem.samples}, {len(data.test_x):,} to test: {problem.network} ({problem.num_parameters:,}"
        f" parameters), batches of {problem.batch} at each worker, {problem.steps} steps ({passes:.1f} passes over the data)"
        f" at a rate of {rate:g}; {', '.join(f'{one:g}' for one in problem.rates)} were tried. The training loss is"
        f" over {measured:,} training {problem.samples}.",
        "",
        *task_rows(found, problem),
        "",
        *findings(found),
    ]


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    head = ["# Bits that gradients are worth", ""]
    made_by = "Made by `python benchmarks/fidelity/dq_sgd.py --write --runs FILE.jsonl`, which can be interrupted."
    lines = [
        "",
        "## The rule",
        "",
        f"Mean bits of {T} steps whose gradients' norms change as named, over the least with which as large a sum of error"
        " bounds can be had (real numbers of levels, solved step by step by bisection).",
        "",
        *rule_rows(),
        "",
        "## Step by step",
        "",
        f"The sum of error bounds of {LONG} steps with `dq(target_bits=4)`, which knows no later step and gives whole bits,"
        " over that of fixed bits of the same mean; and that of the best whole bits, if all gradients were known beforehand."
        " At a server, a step's own size is known; else bits follow those before.",
        "",
        *step_rows(),
    ]
    folder = Path(os.environ.get("PACELINE_DATA") or "no-such-folder")
    if missing := [problem.file for problem in PROBLEMS if not (folder / problem.file).is_file()]:
        print("\n".join([*head, made_by, *lines]))
        print(f"\nThe runs need PACELINE_DATA, a folder with {' and '.join(missing)}. No page is written.")
        return
    file = Path(sys.argv[sys.argv.index("--runs") + 1]) if "--runs" in sys.argv else None
    lines += [
        "",
        "## The runs",
        "",
        f"{WORKERS} simulated workers, plain SGD, from {DROP_AT:.0%} of the steps on at a rate of {DROP_BY:g} of what it was."
        " The rate is the same for all methods, half of what float32 does best with among those that were tried, with a seed"
        " of its own. Loss over training samples and accuracy over all test samples at the end; means of three seeds,"
        " whose beginnings and batches are the same under all methods, and paired 95 % intervals (Student's t). Bits are those"
        " of a worker's gradient as sent, scales and framing included; at the parameter server parameters come back as they"
        " are. No method has a rate of its own: a loss below float32's says that its steps come to more at this one. No time"
        " is measured here.",
    ]
    found = [problem_lines(problem, problem.load(folder), file) for problem in PROBLEMS]
    head += [f"{ABOUT} {'; '.join(first for first, _ in found)}. {NOT_COMMITTED}", "", made_by]
    show([*head, *lines, *(line for _, section in found for line in section)], __file__)


if __name__ == "__main__":
    main()
