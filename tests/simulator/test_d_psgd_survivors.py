"""On one simulated machine, workers of D-PSGD go on without those that are killed, as real ones do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from chosen import each_value
from oracles import gossip
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Faults
from paceline.simulator.views import SimulatedViews
from processes.gossip_reference import GossipReference, Notes, mean_of, patched
from processes.local_reference import Training, steps_in
from rounds import EPOCHS, OPTIMIZERS, SPECS, Loop, in_order, made, shuffled, task_file

NUM_BATCHES = 17
CLUSTER = {"cores": 2, "compute_s": 0.01, "core_bytes_per_s": 2.5e4, "detection_s": 0.012}
TOPOLOGIES = {"ring": gossip.ring, "complete": gossip.complete, "exponential": gossip.exponential}


def training_on(epochs):
    data = lambda batch: epochs[batch[0] // NUM_BATCHES][batch[0] % NUM_BATCHES]  # noqa: E731
    return Training(made, OPTIMIZERS["momentum"], data, nn.functional.cross_entropy)


def check(topology, faults, cluster, name=None):
    """Survivors are as one process would have trained; each batch counts once, unless a worker takes it with it at the end."""
    notes, spec = Notes(), f"d-psgd(topology={topology})"
    with patched(SimulatedViews, notes.add):
        if name is None:
            loop, training = Loop("momentum", NUM_BATCHES, "clear"), training_on([in_order(NUM_BATCHES)] * EPOCHS)
            run = pl.simulate(loop, cluster=cluster, algorithm=spec, faults=faults)
            found = list(loop.models.values())
        else:
            training = training_on(shuffled(NUM_BATCHES))
            config = pl.TrainConfig(task=name, algorithm=spec, epochs=EPOCHS, **SPECS["momentum"])
            simulation = TaskSimulation(config, cluster, faults=faults)
            run, x = simulation.run(), torch.empty(simulation.binding.num_elements)
            simulation.machine.shared.snapshot(x)
            found = [simulation.binding.views(x)]
    dead = run.result["workers_lost"]
    reference = GossipReference(training, steps_in(run.records), notes, TOPOLOGIES[topology])
    expected = mean_of(reference.train())
    for own in found:
        for one, other in zip(own, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert {j for *_, j in notes.missing} <= set(dead)
    counted, last = reference.counted(dead), max(notes.members)
    assert max(counted.values()) == 1
    lost = [notes.begun[one] - notes.sent[one] for one in dead if one in notes.members[last]]
    assert EPOCHS * NUM_BATCHES - counted.total() <= sum(lost)
    return run, notes


def at_step(kills):
    faults = Faults()
    for worker, step in kills.items():
        faults = faults.kill(worker=worker, step=step)
    return faults


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return task_file(tmp_path_factory.mktemp("task"), NUM_BATCHES)


@pytest.mark.parametrize(
    ("topology", "kills"),
    each_value(list(TOPOLOGIES), [{0: 2}, {3: 1}, {0: 2, 2: 2}, {0: 1, 1: 3}, {0: 4}, {1: 5}]),
    ids=str,
)
@pytest.mark.parametrize("kind", ["loop", "task"])
def test_survivors_go_on(topology, kills, kind, name):
    run, notes = check(topology, at_step(kills), Cluster(workers=4, **CLUSTER), name if kind == "task" else None)
    assert sorted(run.result["workers_lost"]) == sorted(kills)
    assert len(notes.members[max(notes.members)]) == 4 - len(kills)


DEATHS = (
    st.sampled_from(list(TOPOLOGIES)),
    st.integers(2, 6),
    st.dictionaries(st.integers(0, 5), st.floats(0.001, 0.5), min_size=1, max_size=5),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(*DEATHS)
def test_whoever_dies_whenever(name, topology, workers, kills, is_task):
    check_deaths(name, topology, workers, kills, is_task)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(*DEATHS)
def test_a_thousand_runs_with_deaths(name, topology, workers, kills, is_task):
    check_deaths(name, topology, workers, kills, is_task)


def check_deaths(name, topology, workers, kills, is_task):
    faults = Faults()
    for worker, at_s in [one for one in kills.items() if one[0] < workers][: workers - 1]:
        faults = faults.kill(worker=worker, at_s=at_s)
    cluster = Cluster(workers=workers, **CLUSTER).slow(worker=workers - 1, factor=2.0)
    check(topology, faults, cluster, name if is_task else None)


def test_a_dead_workers_last_models_are_lost_with_their_steps(name):
    """It dies while its neighbours wait for its model, at many instants of a round."""
    seen = set()
    for part in range(25):
        faults = Faults().kill(worker=1, at_s=0.2 + 0.02 * part)
        run, notes = check("ring", faults, Cluster(workers=4, **CLUSTER), name)
        num_lost = len(run.records[1]) - notes.sent[1]
        assert run.result["steps"] == EPOCHS * NUM_BATCHES + num_lost
        seen.add((num_lost, len(notes.missing)))
    assert {(0, 0), (0, 2)} <= seen


def check_replaced(topology, faults, cluster, name, restarts, epochs):
    """As `check`, where so many of the dead are replaced."""
    notes, training = Notes(), training_on(shuffled(NUM_BATCHES, epochs))
    spec = {"algorithm": f"d-psgd(topology={topology})", "epochs": epochs, "restarts": restarts} | SPECS["momentum"]
    simulation = TaskSimulation(pl.TrainConfig(task=name, **spec), cluster, faults=faults)
    with patched(SimulatedViews, notes.add):
        run, x = simulation.run(), torch.empty(simulation.binding.num_elements)
    assert run.result["outcome"] == "stopped"
    steps = []
    for _, rows in sorted(run.records.items()):
        steps.append([[] for _ in range(max(rows["step"], default=0))])
        for step, batch, samples in zip(*(rows[one].tolist() for one in ("step", "batch", "samples")), strict=True):
            steps[-1][step - 1] = [[batch] if samples else []]
    dead = {*range(cluster.workers)}.difference(simulation.machine.shared.model_ids())
    reference = GossipReference(training, steps, notes, TOPOLOGIES[topology])
    simulation.machine.shared.snapshot(x)
    for one, other in zip(simulation.binding.views(x), mean_of(reference.train()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    counted, last = reference.counted(dead), max(notes.members)
    assert max(counted.values()) == 1
    lost = [notes.begun[one] - notes.sent[one] for one in dead if one in notes.members[last]]
    assert epochs * NUM_BATCHES - counted.total() <= sum(lost)
    return run, notes


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kills", [{1: 2}, {0: 2}, {0: 1, 2: 3}, {3: 4}], ids=str)
def test_replacements_take_part(topology, kills, tmp_path):
    """Some rounds later, with what the first of the others has."""
    name = task_file(tmp_path, NUM_BATCHES, "made")
    run, notes = check_replaced(topology, at_step(kills), Cluster(workers=4, restart_s=0.1, **CLUSTER), name, 2, 8)
    assert (run.result["workers_lost"], run.result["restarts"]) == (sorted(kills), len(kills))
    assert sorted(one for one, came in notes.came.items() if came) == sorted(kills)


REPLACED = (
    st.sampled_from(list(TOPOLOGIES)),
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.001, 1.5)), min_size=1, max_size=6),
    st.sampled_from([0.01, 0.1, 0.3]),
)


@settings(max_examples=30, deadline=None)
@given(*REPLACED)
def test_whoever_is_replaced_whenever(name, topology, workers, kills, restart_s):
    check_replacements(name, topology, workers, kills, restart_s)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(*REPLACED)
def test_a_thousand_runs_with_replacements(name, topology, workers, kills, restart_s):
    check_replacements(name, topology, workers, kills, restart_s)


def check_replacements(name, topology, workers, kills, restart_s):
    """Worker 0 is never killed, so that there is always a worker that can let the others in."""
    faults = Faults()
    for worker, at_s in kills:
        faults = faults.kill(worker=1 + worker % (workers - 1), at_s=at_s)
    cluster = Cluster(workers=workers, restart_s=restart_s, **CLUSTER).slow(worker=workers - 1, factor=2.0)
    check_replaced(topology, faults, cluster, name, len(kills), EPOCHS)
