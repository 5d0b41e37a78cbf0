"""Whole runs, shards x modes x slow workers x deaths: what is read has what is promised, and nobody hangs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from algorithms.server.world import World
from paceline.algorithms.server.registries import mode_registry

SPEEDS = st.sampled_from([1.0, 0.3, 0.1, 0.03, 0.01])


@st.composite
def worlds(draw, modes, *, faults=True, durabilities=("snapshot", "replica")):
    workers, shards, mode = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(modes)
    durability = draw(st.sampled_from(durabilities))
    if mode.one_server:
        shards, durability = 1, "snapshot"
    algorithm = pl.ParameterServer(mode=mode, shards=shards, durability=durability)
    servers = range(workers, workers + shards * (1 if durability == "snapshot" else 2))
    members = st.integers(0, servers.stop - 1)
    trouble = {
        "deaths": draw(st.lists(members, max_size=4)),
        "breaks": draw(st.integers(0, 4)),
        "late": draw(st.sets(st.integers(1, workers - 1), max_size=2)),
    }
    return World(
        algorithm,
        workers=workers,
        steps=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**32)),
        epochs=draw(st.sampled_from([0, 0, 1, 4])),
        slow=draw(st.dictionaries(members, SPEEDS, max_size=3)),
        **(trouble if faults else {}),
    )


BOUNDED = st.builds(pl.Bounded, clock_bound=st.integers(0, 3))
SYNC = st.builds(pl.Sync, backups=st.sampled_from([0, 1]), quorum=st.sampled_from(["global", "per-shard"]))
GATHERED = st.one_of(st.builds(pl.Rennala, gradients=st.integers(1, 7)), st.just(pl.Ringleader()))
RINGMASTER = st.builds(pl.Ringmaster, threshold=st.integers(1, 4))
EVERY = st.one_of(BOUNDED, SYNC, st.just(pl.Async()), GATHERED, RINGMASTER)


def made_once(world):
    """Every shard made the updates of each process of a worker once, in their order."""
    for updates in world.updates:
        last = {}
        for one in updates:
            if one.undone < float("inf"):
                continue
            key = (one.worker, one.incarnation)
            assert one.number > last.get(key, 0)
            last[key] = one.number
    return True


@given(worlds(EVERY, faults=False))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_without_faults_every_update_is_at_every_shard(world):
    world.run()
    assert made_once(world)
    mode = world.mode
    if not mode.together or mode.chosen_once:
        same = [{(one.worker, one.number, mode.chosen_once and one.version) for one in made} for made in world.updates]
        assert all(one == same[0] for one in same)
    if isinstance(mode, pl.Async | pl.Bounded):
        assert len(same[0]) == world.steps * (len(world.left_of) or world.num_workers)
    if isinstance(mode, pl.Bounded):
        assert list(world.missed(mode.clock_bound)) == []


@given(worlds(BOUNDED))
@settings(deadline=None, derandomize=True, max_examples=120)
def test_no_read_lacks_an_update_that_its_bound_promises(world):
    """Also with deaths of workers, servers and second copies, late workers and connections that break."""
    world.run()
    assert made_once(world)
    assert list(world.missed(world.mode.clock_bound)) == []


@given(worlds(EVERY))
@settings(deadline=None, derandomize=True, max_examples=120)
def test_nobody_hangs_and_no_update_is_made_twice(world):
    world.run()
    assert made_once(world)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_bound_is_tight(shards):
    """A straggler lets the others come to the bound, and reads there lack what one update less would promise."""
    world = World(
        pl.ParameterServer(mode=pl.Bounded(clock_bound=2), shards=shards), workers=3, steps=20, seed=1, slow={2: 0.01}
    ).run()
    assert list(world.missed(2)) == []
    assert list(world.missed(1))


def test_a_lost_choice_does_not_keep_the_other_shards_waiting():
    """Shard 0 dies when it has decided on a step, before it could tell: nobody will, and its successor is a step ahead."""
    for seed in range(40):
        algorithm = pl.ParameterServer(shards=2)
        World(algorithm, workers=2, steps=6, seed=seed, deaths=[2]).run()


def test_every_mode_is_drawn():
    modes = {pl.Bounded, pl.Sync, pl.Async, pl.Rennala, pl.Ringmaster, pl.Ringleader}
    assert modes == {mode for _, mode in mode_registry.items()}, "name a new one in EVERY"
