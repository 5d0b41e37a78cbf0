"""Codecs take the time that the cluster's file says; where it says nothing, that of their own constants."""

import pytest

import paceline as pl
from paceline.compression.qsgd import QSGD
from paceline.simulator import Cluster

NUM_PARAMETERS, STEPS = 1_000_000, 20
BYTES = 4 * NUM_PARAMETERS
CORE = 1e10


def codec_s(algorithm, workers, codecs=()):
    """Of one worker and step: what coding and decoding took."""
    cluster = Cluster(workers=workers, compute_s=0.01, core_bytes_per_s=CORE, codecs=codecs)
    config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, steps=STEPS * workers)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=NUM_PARAMETERS)
    rows = run.records[1]
    return float(rows["codec_s"].sum()) / len(rows)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_coding_an_all_reduce_takes_what_was_measured(workers):
    """Of every worker: its vector is coded, its part of the mean once more; all that comes in decoded, and the mean."""
    coded, decoded = 2e9, 5e9
    others_s = (3 + 3 + 2 / workers + 2) * BYTES / CORE  # copies and sums beside them
    expected_s = (1 + 1 / workers) * BYTES / coded + 2 * BYTES / decoded + others_s
    found_s = codec_s("all-reduce(codec=qsgd(bits=3))", workers, (("qsgd", coded, decoded), ("sign", 1.0, 1.0)))
    assert found_s == pytest.approx(expected_s, rel=1e-3)
    codec = QSGD()
    constant_s = ((1 + 1 / workers) * codec.moves.encoding + 2 * codec.moves.decoding) * BYTES / CORE + others_s
    for codecs in ((), (("sign", 1.0, 1.0),)):
        assert codec_s("all-reduce(codec=qsgd(bits=3))", workers, codecs) == pytest.approx(constant_s, rel=1e-3)


@pytest.mark.parametrize("place", [0, 1], ids=["a worker's coding", "the server's decoding"])
def test_a_push_takes_what_was_measured(place):
    """Two workers in lockstep: a step lasts longer by what coding does, or by decoding both gradients, one after the other."""

    def step_s(rate):
        rates = [1e12, 1e12]
        rates[place] = rate
        cluster = Cluster(workers=2, compute_s=0.01, codecs=(("sign", *rates),))
        config = pl.TrainConfig(task="digits-mlp", algorithm="parameter-server(codec=sign)", steps=STEPS)
        settings = {"timing_only": True, "num_parameters": NUM_PARAMETERS}
        return pl.simulate_task(config, cluster=cluster, **settings).result["wall_s"] / STEPS

    longer_s = (1 + place) * (BYTES / 1e8 - BYTES / 1e9)
    assert step_s(1e8) - step_s(1e9) == pytest.approx(longer_s, rel=0.05)


def test_dq_takes_what_was_measured_whatever_its_bits():
    rates = (("dq", 1e9, 2e9),)
    few, many = (codec_s(f"all-reduce(codec=dq(target_bits={bits}))", 2, rates) for bits in (2, 8))
    assert few == pytest.approx(many)
    assert few != pytest.approx(codec_s("all-reduce(codec=dq)", 2), rel=0.1)
