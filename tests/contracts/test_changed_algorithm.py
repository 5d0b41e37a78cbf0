"""A resumed run keeps its algorithm by default; the result notes another one, or an error refuses it by name."""

import itertools
import json
import random
import shutil

import numpy as np
import pytest

import paceline as pl
import soak_results
from contracts.test_stops import BATCHES, EPOCHS, train
from paceline.run.earlier_part import EarlierPart

pytestmark = pytest.mark.usefixtures("nothing_left")

NAMES = sorted(dict(pl.algorithms.registry.items()))
PAIRS = list(itertools.product(NAMES, NAMES))
DRAWN = random.Random("pairs").sample(PAIRS, 24)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of an algorithm's run that a limit ended in its first epoch; made once."""
    folder = tmp_path_factory.mktemp("stopped")

    def make(algorithm):
        if not (folder / algorithm).exists():
            launch(algorithm, out=folder / algorithm, limit_samples=120, seed=3)
        return folder / algorithm

    return make


def launch(algorithm, **settings):
    sequential = "sequential" in (algorithm, settings.pop("earlier", None))
    return pl.launch(train, workers=1 if sequential else 2, backend="threads", algorithm=algorithm, **settings)


def resume_as(earlier, algorithm, folder):
    """Resumes the run in this folder and checks its result; returns whether it was refused."""
    run, refusal = None, ""
    try:
        run = launch(algorithm, earlier=earlier, resume=folder)
    except pl.UsageError as error:
        refusal = str(error)
    if run is None:
        assert f"The run was started with {earlier}, which" in refusal
        assert f"it cannot be resumed with {algorithm}." in refusal
        return True
    assert run.result["outcome"] == "stopped"
    assert run.result["algorithm"] == algorithm
    assert any(f"The run continues with {algorithm}; until" in one for one in run.result["notes"]) == (
        algorithm != earlier
    )
    records = np.concatenate(list(run.records.values()))
    assert sorted(records["batch"][records["samples"] > 0].tolist()) == list(range(EPOCHS * BATCHES))
    assert run.result["records_lost"] == 0
    assert EarlierPart.of(folder).notes == ()  # it can be resumed once more
    return False


@pytest.mark.parametrize(("earlier", "algorithm"), DRAWN)
def test_another_algorithm(earlier, algorithm, stopped, tmp_path):
    """`make soak` takes all pairs."""
    resume_as(earlier, algorithm, shutil.copytree(stopped(earlier), tmp_path / "run"))


@pytest.mark.soak
def test_all_pairs(stopped, tmp_path):
    """Writes how many were refused to PACELINE_SOAK_RESULTS."""
    refused = 0
    for number, (earlier, algorithm) in enumerate(PAIRS):
        refused += resume_as(earlier, algorithm, shutil.copytree(stopped(earlier), tmp_path / str(number)))
    soak_results.keep("soak_stops", "pairs of algorithms", {"pairs": len(PAIRS), "refused by name": refused})


@pytest.mark.parametrize("algorithm", NAMES)
def test_the_folders_algorithm_and_seed_are_the_default(algorithm, stopped, tmp_path):
    folder = shutil.copytree(stopped(algorithm), tmp_path / "run")
    (folder / "result.json").unlink()  # as if the run had been killed
    config = json.loads((folder / "config.json").read_text())
    run = launch(None, earlier=algorithm, resume=folder)
    assert run.result["algorithm"] == algorithm
    assert run.config["seed"] == config["seed"] == 3
