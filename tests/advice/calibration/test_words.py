"""What workers that calibrate together tell each other: read as it was said, and refused where nobody would say so."""

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.advice.calibration import words
from paceline.advice.calibration.cluster_file import MeasuredWorker
from paceline.advice.calibration.codecs import CodecRate
from paceline.advice.calibration.measurements import MemoryTimes, Quartiles

SPREAD = Quartiles.of([0.001, 0.002, 0.004])
MEMORY = MemoryTimes(SPREAD, [SPREAD, SPREAD], SPREAD, Quartiles.of([-1e-6, 1e-6]))
ABOUT = {"processor": "A", "cores": 2, "memory_gib": 8.0, "system": "Linux"}
RATES = {"qsgd": CodecRate(1e9, 2.5e9), "sign": CodecRate(3e9, 1e8)}
WORKER = MeasuredWorker(-1, "host-1", ABOUT, {4: SPREAD, 16: SPREAD}, [0.001, 0.002], SPREAD, None)
SAID = {
    "hello": {"machine": "m1", "asked": "digits-mlp, batches of 16"},
    "machine_numbers": [0, 0, 1],
    "measured_worker": {
        name: value
        for name, value in asdict(WORKER).items()
        if name in ("host", "about", "compute_s", "steps_s", "update_s")
    },
    "memory": asdict(MEMORY),
    "codec_rates": RATES,
    "round_trips": [(1, {100: [1e-4, 2e-4], 10**6: [0.001]}), (2, {100: [1e-4]})],
}
READ = {
    "hello": words.hello,
    "machine_numbers": lambda said: words.machine_numbers(said, 3),
    "measured_worker": words.measured_worker,
    "memory": words.memory,
    "codec_rates": words.codec_rates,
    "round_trips": lambda said: words.round_trips(said, 0, 3),
}
MEANT = SAID | {"measured_worker": WORKER, "memory": MEMORY, "codec_rates": RATES}


def sent(said):
    return json.loads(json.dumps(said))


@pytest.mark.parametrize("what", SAID)
def test_what_was_said_is_read(what):
    assert READ[what](sent(SAID[what])) == MEANT[what]


def test_a_measurement_without_memory_says_so():
    assert words.memory(None) is None


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
            found = READ[what](said)
        except ValueError:
            return
        if found is None:
            assert said is None
            return
        assert type(found) is type(MEANT[what])
        plain = asdict(found) if what in ("measured_worker", "memory") else found
        plain = {key: value for key, value in plain.items() if key != "about"} if isinstance(plain, dict) else plain
        assert all(math.isfinite(one) for one in numbers(plain))

    look()
