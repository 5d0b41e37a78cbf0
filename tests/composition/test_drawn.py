"""Every combination comes to what the oracles say, or is refused before its first step."""

import contextlib
import warnings
from collections import Counter
from dataclasses import replace

import pytest

import paceline as pl
import soak_results
from composition import page
from composition.drawn import ALGORITHMS, CODECS, case, with_codec
from composition.loop import launched, simulated
from composition.methods import check


def judge(number, run=simulated, one=None):
    """Whether a combination is right, refused or ended by a death; anything else is an error, which names the combination.

    None: the combination of this number.
    """
    one = case(number) if one is None else one
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return check(one, run(one))
    except Exception as error:
        error.add_note(f"Combination {number}: {one}")
        raise


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_page_shows_the_tables(half):
    """Of all that an algorithm may meet, and of all algorithms that meet it, every other one is run."""
    written = page.PAGE.read_text(encoding="utf-8")
    shown, columns = page.written(written), [*page.ADDED, *page.CODED]

    def outcome(algorithm, what):
        is_run = (ALGORITHMS.index(algorithm) + columns.index(what)) % 2 == half
        return page.outcome(algorithm, what) if is_run else shown[algorithm, what]

    assert len(shown) == len(ALGORITHMS) * len(columns)
    assert page.filled(written, outcome) == written, "python -m composition.page, in the folder of tests, writes them"


TENS = [*range(10), 14]  # with every algorithm, codec and optimizer, and deaths and infinities in rounds and without


@pytest.mark.parametrize("tens", TENS)
def test_combinations(tens):
    for number in range(10 * tens, 10 * tens + 10):
        judge(number)


OVERLAPPED = [
    "downpour(overlap=true)",
    "downpour(push=3,fetch=2,overlap=true)",
    "downpour(fetch=3,apply=user,overlap=true)",
]


#: Of combinations; the others are for `make soak`.
TWENTIES = [range(20), pytest.param(range(20, 40), marks=pytest.mark.soak)]


@pytest.mark.parametrize("algorithm", OVERLAPPED)
@pytest.mark.parametrize("numbers", TWENTIES, ids=["first", "others"])
def test_combinations_with_messages_that_overlap(algorithm, numbers):
    """Without deaths: the record of a push that is under way dies with its worker."""
    found = Counter()
    for number in numbers:
        drawn = case(number)
        codec = None if number % 2 else CODECS[number % len(CODECS)]
        found[judge(number, one=replace(drawn, algorithm=with_codec(algorithm, codec), kill=None))] += 1
    assert found == {"right": 20}


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd(period=2,warmup_steps=2)"])
@pytest.mark.parametrize(
    ("numbers", "least"), [(range(20), 16), pytest.param(range(20, 40), 14, marks=pytest.mark.soak)]
)
def test_combinations_with_sparse_gradients(algorithm, numbers, least):
    """With optimizers that take them."""
    found = Counter()
    for number in numbers:
        drawn = case(number)
        optimizer = drawn.optimizer if drawn.optimizer != "adamw" else "sgd"
        one = replace(drawn, algorithm=algorithm, optimizer=optimizer, sparse=True)
        found[judge(number, one=one)] += 1
    assert found["refused"] == 0
    assert found["right"] >= least


@pytest.mark.soak
@pytest.mark.parametrize("hundreds", range(1, 22))
def test_many_combinations(hundreds):
    numbers = range(100 * hundreds, 100 * hundreds + 100)
    found = Counter(judge(number) for number in numbers)
    soak_results.keep("soak_combinations", f"{numbers[0]} to {numbers[-1]}", dict(sorted(found.items())))


def is_exact(one):
    """Whether real workers leave an exact trace.

    Racing writes may be lost; servers' measured times, and the order in which gradients come to ringleader, are heard only in
    a simulation; and what waits at rennala when a worker dies is in no record.
    """
    inexact = ("hogwild", "rescaled", "ringleader", *(["rennala"] if one.kill is not None else []))
    return not any(name in one.algorithm for name in inexact)


@pytest.mark.soak
@pytest.mark.parametrize("number", [number for number in range(0, 2000, 10) if is_exact(case(number))])
def test_on_processes(number, tmp_path):
    """A tenth, on real workers."""
    expected, found = judge(number), "refused"
    with contextlib.suppress(pl.PacelineError) if expected == "refused" else contextlib.nullcontext():
        found = judge(number, lambda one: launched(one, tmp_path))
    assert (found == "refused") == (expected == "refused")
