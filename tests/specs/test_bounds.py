"""What a run's numbers may be, and what is said of those beyond."""

import dataclasses
import doctest
import importlib
import math
import resource

import numpy as np
import pytest

import paceline as pl
from paceline.algorithms import backoff_registry, registry, step_size_registry
from paceline.algorithms.server.registries import apply_registry, codec_registry, delay_registry, mode_registry
from paceline.algorithms.topology import topology_registry
from paceline.data.plan import partition_registry
from paceline.errors import UsageError, printable, shown
from paceline.memory.placement import placement_registry
from paceline.run.config import TrainConfig
from paceline.simulator import Cluster
from paceline.simulator.compute import compute_registry
from paceline.simulator.hardware.sockets import Sockets
from paceline.specs import bounds
from paceline.specs.goal import Goal
from paceline.specs.types import allowed_types

REGISTRIES = (
    registry, backoff_registry, step_size_registry, apply_registry, codec_registry, delay_registry, mode_registry,
    partition_registry, placement_registry, compute_registry, topology_registry,
)  # fmt: skip
CLASSES = {cls for kinds in REGISTRIES for _, cls in kinds.items()} | {Cluster, Sockets}
HUGE = 10**400


@pytest.mark.parametrize("name", ["specs.bounds", "errors"])
def test_the_doctests_hold(name):
    found = doctest.testmod(importlib.import_module(f"paceline.{name}"))
    assert (found.failed, found.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("bound", "value", "says"),
    [
        (
            bounds.SEED,
            2**63,
            "must be at most 9,223,372,036,854,775,807, not 9223372036854775808: generators take 63 bits.",
        ),
        (bounds.SEED, -1, "--x must be 0 or more, not -1."),
        (bounds.SEED, 1.0, "--x must be a whole number, not 1.0."),
        (bounds.SEED, True, "--x must be a whole number, not True."),
        (bounds.SEED, None, "--x must be a whole number, not None."),
        (bounds.COUNT, 10**5000, "not a number of thousands of digits: beyond it"),
        (bounds.COUNT, "a\x1b[31m", "not 'a\\x1b[31m'."),
        (bounds.EPOCHS, math.nan, "--x must be a number above 0, not nan."),
        (bounds.EPOCHS, math.inf, "--x must be at most 1e9, not inf: batches"),
        (bounds.EPOCHS, np.float64(-0.5), "--x must be a number above 0, not -0.5."),
        (bounds.ABOVE_0, math.inf, "--x must be a number above 0, not inf."),
        (bounds.FROM_0, HUGE, "--x must be 0 or more, not 1000000"),
        (bounds.NUMBER, -math.inf, "--x must be a number, not -inf."),
        (bounds.DECAY, 1.0, "--x must be from 0 to below 1, not 1.0."),
        (bounds.BETWEEN_0_AND_1, 0, "--x must be above 0 and below 1, not 0."),
        (bounds.FRACTION, 0, "--x must be above 0 and up to 1, not 0."),
        (bounds.ACCURACY, 97, "--x must be at most 1, not 97: it is a fraction; write 0.95 for 95 %."),
        (bounds.SHARE, np.float32(1), None),
        (bounds.COUNT, np.int64(1), None),
    ],
    ids=range(19),  # of numbers with thousands of digits, pytest could not make one
)
def test_a_bound_refuses_in_a_sentence(bound, value, says):
    if says is None:
        bound.check("--x", value)
        return
    with pytest.raises(UsageError) as error:
        bound.check("--x", value)
    assert says in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_every_number_of_a_spec_or_a_cluster_has_a_bound(cls):
    """A field without one would take what no machine can hold: annotate it, Annotated[int, COUNT]."""
    for name, allowed in allowed_types(cls).items():
        for member, bound in allowed:
            assert member not in (int, float) or bound is not None, f"{cls.__name__}.{name}"
            if bound is None or cls is Sockets:
                continue
            for beyond in (bound.least - 1, math.nan, HUGE if bound.most < math.inf else math.inf, "x"):
                with pytest.raises(ValueError, match=name):
                    cls(**{**_required(cls), name: beyond})


def _required(cls):
    delay = delay_registry.build("constant(updates_late=1)")
    given = {"delays": "1", "links": "0-1", "updates_late": 1, "highest": 1, "clock_bound": 1, "times_s": (1.0,)}
    fields = {one.name for one in dataclasses.fields(cls) if one.init}
    return {name: value for name, value in given.items() if name in fields} | (
        {"delay": delay} if cls.__name__ == "Delayed" else {}
    )


def test_every_number_of_a_configuration_has_a_bound():
    for cls in (TrainConfig, Goal):
        for one in dataclasses.fields(cls):
            if any(word in str(one.type) for word in ("int", "float")) and one.name not in ("slow", "inject_staleness"):
                assert one.name in bounds._RUN, one.name


@pytest.mark.parametrize("name", sorted(set(bounds._RUN) & {one.name for one in dataclasses.fields(TrainConfig)}))
def test_a_configuration_refuses_what_no_run_can_have(name):
    for value in (-HUGE, math.nan, "x", [1]):
        with pytest.raises(UsageError, match=f"^{name}"):
            TrainConfig(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"task": 5}, "task of TrainConfig must be a text, not 5"),
        ({"workers": 2.0}, "workers of TrainConfig must be a whole number, not 2.0"),
        ({"slow": [1]}, "slow"),
        ({"slow": {0: "x"}}, "slow maps workers to factors, not 0 to 'x'"),
        ({"slow": {0: 10**400}}, "slow maps workers to factors"),
        ({"workers": 2, "slow": {5: 2}}, "slow names worker 5"),
        ({"data": 3}, "data of TrainConfig must be"),
    ],
)
def test_a_configuration_of_other_types_is_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        TrainConfig(**arguments)


def test_a_folder_of_data_may_be_a_text():
    assert TrainConfig(data="here").data.name == "here"


@pytest.mark.parametrize("function", [pl.launch, pl.simulate])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"workers": 10**20}, "workers"),
        ({"workers": "2"}, "whole number"),
        ({"workers": 2, "seed": 2**64}, "seed must be at most"),
        ({"workers": 2, "seed": "a"}, "^seed must be a whole number, not 'a'"),
        ({"workers": 2, "algorithm": 5}, "algorithm must be a spec"),
        ({"workers": 2, "limit_s": math.nan}, "limit_s must be a number above 0"),
        ({"workers": 2, "limit_samples": 0.5}, "limit_samples must be a whole number"),
        ({"workers": 2, "out": "/dev/null/x"}, "cannot be made"),
    ],
)
def test_python_functions_refuse_alike(function, arguments, says):
    with pytest.raises(UsageError, match=says):
        function(lambda: None, **arguments)


def test_more_workers_than_fit_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(bounds, "available_bytes", lambda **which: 10**9)
    bounds.check_workers(20, backend="processes")
    with pytest.raises(UsageError, match=r"100 workers as processes, about 3\.7 GiB .* 953\.7 MiB .* start 25 at most"):
        bounds.check_workers(100, backend="processes")
    with pytest.raises(UsageError, match="20 workers and 30 servers as processes"):
        bounds.check_workers(20, backend="processes", num_servers=30)
    bounds.check_simulation(10_000)
    with pytest.raises(UsageError, match=r"100,000 simulated workers .* simulate 71,428 at most"):
        bounds.check_simulation(100_000)
    with pytest.raises(UsageError, match="simulate 496 at most"):
        bounds.check_simulation(10_000, held_bytes=2e10)


def test_more_workers_than_file_descriptors_are_refused(monkeypatch):
    monkeypatch.setattr(bounds, "available_bytes", lambda **which: 10**15)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (300, 300))
    bounds.check_workers(50, backend="threads")
    with pytest.raises(
        UsageError, match=r"500 file descriptors .* may open only 300: start 50 at most, or raise ulimit -n"
    ):
        bounds.check_workers(100, backend="threads")
    with pytest.raises(UsageError, match="at most 32,766, not 40000"):
        bounds.check_workers(40_000, backend="threads")


def test_memory_is_what_the_tightest_limit_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(bounds, "_OWN_GROUP", tmp_path / "own")
    free = bounds.available_bytes()
    assert free > 2**20
    (tmp_path / "own").write_text("0::/outer/inner\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    for name, text in (("max", f"{2**20}\n"), ("current", "1000\n"), ("stat", "anon 900\ninactive_file 100\n")):
        (tmp_path / "outer" / f"memory.{name}").write_text(text)
    assert bounds.available_bytes() == 2**20 - 1000 + 100
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 1))
    assert bounds.available_bytes() == 0, "more is mapped than ulimit -v allows"


def test_texts_of_others_control_nothing():
    for text in ("\x1b]0;title\x07", "\u202e", "\udcff", "\x9b"):
        assert printable(text) == repr(text)[1:-1]
    assert printable("ä [/red] 雪") == "ä [/red] 雪"
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "what is nested too deeply"
    while deep:  # taken apart by hand: Python would use up the stack for it
        (deep,) = deep
