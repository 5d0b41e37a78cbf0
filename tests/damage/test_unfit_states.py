"""State of another shape or type than a run writes, with right checksums: refused in one sentence, before any training.

make soak                                     400 of them
DAMAGE_SEED=7 pytest -m soak tests/damage     400 others
"""

import json
import os
import random
import shutil
import time
import warnings
from collections import Counter

import pytest
from typer.testing import CliRunner

import soak_results
from damage.damages import copied
from damage.states import CONFIG, FAMILIES, FOREIGN, KINDS, Unfit, made, parts_of, put
from damage.test_damaged_files import what_is_wrong
from paceline.cli.app import app

pytestmark = [  # what families are made for here
    pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning"),
    pytest.mark.filterwarnings("ignore::paceline.errors.AlgorithmWarning"),
]
SEED = int(os.environ.get("DAMAGE_SEED", "1"))
LONG = 400
VERB = ["train", "--resume", "{}", "--steps", str(CONFIG["steps"] + 4)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a family, made when first asked for."""
    folder, known = tmp_path_factory.mktemp("whole"), {}

    def of(family):
        if family not in known:
            known[family] = [made(family, folder / f"{len(known)}-{number}") for number in range(2)]
        return known[family]

    return of


def tried(family, number, seed, runs, tmp_path, first=0):
    """Changes a run's state so many times and resumes it; how that ended, and what went wrong."""
    whole, other = runs(family)
    draws, parts = random.Random(f"{family} {seed}"), parts_of(whole)
    codes, failures = Counter(), []
    for at in range(number):
        folder = copied(whole, tmp_path / "run")
        where = None
        while where is None:
            if draws.random() < 0.1:
                where = draws.choice(FOREIGN)
                put(folder, where, other)
            else:
                unfit = Unfit(draws.choice(parts), KINDS[(first + at) % len(KINDS)], draws.randrange(2**32))
                where = unfit.apply(folder)
                where = f"{unfit} at {where}" if where is not None else None
        before = codes["0"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrong = what_is_wrong(VERB, folder, tmp_path / "out", codes)
        if wrong.startswith("refused, and wrote"):  # another worker was faster than the one that refused its part
            put(folder, "checkpoint", whole)
            wrong = what_is_wrong(VERB, folder, tmp_path / "out", Counter()) or not_whole(folder)
        elif not wrong and codes["0"] > before and not is_said(folder, said):
            wrong = "accepted"
        if wrong:
            failures.append(f"{family}: {where}: {wrong}")
        shutil.rmtree(folder)
    return codes, failures


def not_whole(folder):
    """What a run lacks that has gone on from the checkpoint as it was."""
    result = json.loads((folder / "result.json").read_text())
    return "" if result["records_lost"] == result["batches_missed"] == 0 else f"not whole: {result}"


def is_said(folder, warned):
    """Whether a run that went on has said what it left out."""
    notes = json.loads((folder / "result.json").read_text())["notes"]
    return any("memory is ignored" in str(one.message) for one in warned) or any("records_lost" in one for one in notes)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_run_has_written_is_accepted(family, runs, tmp_path):
    folder = copied(runs(family)[0], tmp_path / "run")
    result = CliRunner().invoke(app, [word.format(folder) for word in VERB], prog_name="paceline")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("family", FAMILIES)
def test_some_states(family, runs, tmp_path):
    _, failures = tried(family, 1, SEED, runs, tmp_path, first=list(FAMILIES).index(family))
    assert not failures, "\n".join(failures)


@pytest.mark.soak
def test_four_hundred_states(runs, tmp_path):
    """Writes to PACELINE_SOAK_RESULTS how the runs ended; DAMAGE_SEED draws others."""
    begun_s, found, failures = time.monotonic(), {}, []
    each, more = divmod(LONG, len(FAMILIES))
    for at, family in enumerate(FAMILIES):
        codes, wrong = tried(family, each + (at < more), SEED, runs, tmp_path)
        found[family] = dict(codes)
        failures += wrong
    figures = {
        "states": LONG,
        "wrong": len(failures),
        "took_s": round(time.monotonic() - begun_s, 1),
        "exit_codes": found,
    }
    soak_results.keep("soak_damaged_files", f"unfit states, seed {SEED}", figures)
    assert not failures, f"{len(failures)} with seed {SEED}:\n" + "\n".join(failures)
