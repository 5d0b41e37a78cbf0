"""Small studies on simulated workers, in milliseconds: what is tested is what a study does with its trials."""

import dataclasses

import pytest

from paceline.study.study_file import Limits, Study

TIMED = Study(
    name="timed",
    backend="simulator",
    timing_only=True,
    parameters=1000,
    factors={"algorithm": ("hogwild", "leashed"), "workers": (1, 2)},
    seeds=(0, 1),
    limits=Limits(steps=4),
)
TRAINED = Study(
    name="trained",
    backend="simulator",
    factors={"algorithm": ("locked", "leashed")},
    settings={"workers": 2, "batch_size": 32},
    seeds=(0, 1),
    limits=Limits(epochs=6),
    targets=(90, 75, 1),
    target=75,
)


@pytest.fixture(scope="session")
def timed():
    return lambda **changes: dataclasses.replace(TIMED, **changes)


@pytest.fixture(scope="session")
def trained():
    return lambda **changes: dataclasses.replace(TRAINED, **changes)
