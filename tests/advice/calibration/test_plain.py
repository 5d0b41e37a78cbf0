"""What workers that calibrate together tell each other: read as it was said, and refused where nobody would say so."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.advice.calibration.cluster import _machine_numbers
from paceline.advice.calibration.cluster_file import MeasuredWorker
from paceline.advice.calibration.codecs import CodecRate
from paceline.advice.calibration.gather import read
from paceline.advice.calibration.measurements import MemoryTimes, Quartiles

SPREAD = Quartiles.of([0.001, 0.002, 0.004])
MEMORY = MemoryTimes(SPREAD, [SPREAD, SPREAD], SPREAD, Quartiles.of([-1e-6, 1e-6]))
ABOUT = {"processor": "A", "cores": 2, "memory_gib": 8.0, "system": "Linux"}
RATES = {"qsgd": CodecRate(1e9, 2.5e9), "sign": CodecRate(3e9, 1e8)}
TRIPS = {1: {100: [1e-4, 2e-4], 10**6: [0.001]}, 2: {100: [1e-4]}}
WORKER = MeasuredWorker(0, "host-1", ABOUT, {4: SPREAD, 16: SPREAD}, [0.001, 0.002], SPREAD, MEMORY, RATES, TRIPS)
OTHER = MeasuredWorker(0, "host-1", ABOUT, {4: SPREAD, 16: SPREAD}, [0.001, 0.002], SPREAD, None)
MEANT = {"hello": ["m1", "digits-mlp, batches of 16"], "machines": [0, 0, 1], "worker": WORKER, "other": OTHER}
KINDS = {"hello": list[str], "machines": list[int], "worker": MeasuredWorker, "other": MeasuredWorker}
SAID = {name: asdict(value) if isinstance(value, MeasuredWorker) else value for name, value in MEANT.items()}


def sent(said):
    return json.loads(json.dumps(said))


@pytest.mark.parametrize("what", SAID)
def test_what_was_said_is_read(what):
    assert read(KINDS[what], sent(SAID[what])) == MEANT[what]


DAMAGES = {
    "of another machine": {"machine": 1},
    "no steps": {"steps_s": []},
    "a step of 0 s": {"steps_s": [0.001, 0.0]},
    "a batch of 0": {"compute_s": {0: SPREAD}},
    "an update of negative time": {"update_s": Quartiles(-0.1, 0.1, 0.1, 3)},
    "an update never measured": {"update_s": Quartiles(0.1, 0.1, 0.1, 0)},
    "no crowded copies": {"memory": MemoryTimes(SPREAD, [], SPREAD, SPREAD)},
    "an unknown codec": {"codecs": {"zip": CodecRate(1e9, 1e9)}},
    "a codec that is never done": {"codecs": {"sign": CodecRate(1e9, 0.0)}},
    "a link to itself": {"round_trips_s": {0: {100: [1e-4]}}},
    "a link to nobody": {"round_trips_s": {3: {100: [1e-4]}}},
    "a message of 0 bytes": {"round_trips_s": {1: {0: [1e-4]}}},
    "a link without a trip": {"round_trips_s": {1: {100: []}}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_measurements_that_nobody_can_have_made_are_refused(damage):
    assert WORKER.checked(0, [0, 0, 1]) is WORKER
    with pytest.raises(ValueError, match="not above 0, or unknown"):
        replace(WORKER, **DAMAGES[damage]).checked(0, [0, 0, 1])


@pytest.mark.parametrize("said", [[0, 0], [0, 0, 3], [0, -1, 1], [0, 0, "1"]])
def test_machines_that_are_not_those_of_the_workers_are_refused(said):
    assert _machine_numbers(3, 0, [0, 0, 1]) == [0, 0, 1]
    with pytest.raises(ValueError, match=r"machines of 3 workers|a number is expected"):
        _machine_numbers(3, 0, said)


ODD = st.sampled_from(
    [None, True, -1, 0, 3, 1.5, -1e-9, 1e400, math.nan, -math.inf, 10**400, "", "7", "x", [], {}, [[]], [1], {"a": 1}]
)


def changed(draw, said):
    """With one thing changed, left out or added somewhere within it."""
    if isinstance(said, dict | list) and said and draw(st.booleans()):
        keys = list(said) if isinstance(said, dict) else range(len(said))
        key = draw(st.sampled_from(keys))
        made = said.copy()
        match draw(st.sampled_from(["within", "within", "without", "key"])):
            case "without":
                del made[key]
            case "key" if isinstance(said, dict):
                made[draw(st.sampled_from(["", "-4", "0", "x", "9" * 40]))] = made.pop(key)
            case _:
                made[key] = changed(draw, said[key])
        return made
    return draw(ODD)


def numbers(value):
    """All that are in it."""
    if isinstance(value, dict):
        return [one for pair in value.items() for member in pair for one in numbers(member)]
    if isinstance(value, list | tuple):
        return [one for member in value for one in numbers(member)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("what", SAID)
def test_anything_else_is_refused_or_harmless(what):
    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.data())
    def look(data):
        said = changed(data.draw, sent(SAID[what]))
        try:
            found = read(KINDS[what], said)
        except ValueError:
            return
        assert type(found) is type(MEANT[what])
        plain = asdict(found) if isinstance(found, MeasuredWorker) else found
        plain = {key: value for key, value in plain.items() if key != "about"} if isinstance(plain, dict) else plain
        assert all(math.isfinite(one) for one in numbers(plain))

    look()
