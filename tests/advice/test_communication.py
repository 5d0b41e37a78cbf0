"""Whether a codec pays: what is advised on slow and on fast networks."""

import pytest

import paceline as pl
from advice.planted import Law, Planted
from paceline.advice.advise import advise
from paceline.advice.answer import Candidate, Circumstances, Target
from paceline.advice.candidates import candidates
from paceline.advice.program import Shape
from paceline.simulator import Cluster

SHAPE = Shape(num_parameters=3_000_000, batch_size=10)
CODED = "all-reduce(codec=qsgd)"
SLOW, FAST = 12.5e6, 12.5e9  # bytes/s: 100 Mbit/s, 100 Gbit/s
WITH_AND_WITHOUT = ("sequential", "all-reduce", CODED)
METHODS = (*WITH_AND_WITHOUT, "local-sgd", "da-sgd", "diloco(period=20)")


def step_s(algorithm, cluster, num_parameters=SHAPE.num_parameters, steps=16):
    config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, steps=steps)
    return (
        pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=num_parameters).result["wall_s"]
        / steps
    )


class OnANetwork(Planted):
    """As fast as simulated, without gradients; whoever averages models needs 1.3 times as many samples."""

    def __init__(self):
        super().__init__({"sequential": Law(worse=0.0)})

    def shape(self):
        return SHAPE

    def law(self, candidate):
        averages = candidate.algorithm.partition("(")[0] in ("local-sgd", "da-sgd", "diloco")
        return Law(worse=0.0, scale=1300.0 if averages else 1000.0)

    def rate(self, candidate, cluster, shape):
        return shape.batch_size * candidate.workers / step_s(candidate.algorithm, cluster, steps=40 * candidate.workers)


def advice(cluster, tmp_path, monkeypatch, methods=METHODS):
    monkeypatch.setattr("paceline.advice.candidates.DEFAULT", methods)
    file = cluster.save(tmp_path / "cluster.toml")
    return advise(
        OnANetwork(), target=Target(accuracy=0.9), circumstances=Circumstances(cluster=file), max_workers=cluster.workers,
        processes=0,
    )  # fmt: skip


def place(found, algorithm):
    """Of the best number of workers."""
    return next(number for number, one in enumerate(found.ranked) if one.candidate.algorithm == algorithm)


def test_on_a_slow_network_less_communication_is_advised(tmp_path, monkeypatch):
    found = advice(Cluster(workers=4, compute_s=0.05, bandwidth_bytes_per_s=SLOW), tmp_path, monkeypatch)
    assert found.best.candidate == Candidate(algorithm="diloco(period=20)", workers=4)
    order = [place(found, one) for one in ("da-sgd", CODED, "all-reduce")]
    assert place(found, CODED) < place(found, "all-reduce")
    assert max(order) == order[-1], "whatever sends less comes before all-reduce"


@pytest.mark.parametrize(
    ("bandwidth", "codecs"), [(FAST, ()), (SLOW, (("qsgd", 1e7, 1e7),))], ids=["fast network", "slow codec"]
)
def test_where_coding_takes_longer_than_the_bytes_it_ranks_behind(bandwidth, codecs, tmp_path, monkeypatch):
    cluster = Cluster(workers=4, compute_s=0.1, bandwidth_bytes_per_s=bandwidth, codecs=codecs)
    found = advice(cluster, tmp_path, monkeypatch, WITH_AND_WITHOUT)
    assert place(found, "all-reduce") < place(found, CODED)


def test_measured_speeds_of_codecs_decide(tmp_path, monkeypatch):
    cluster = Cluster(workers=4, compute_s=0.1, bandwidth_bytes_per_s=SLOW, codecs=(("qsgd", 1e13, 1e13),))
    found = advice(cluster, tmp_path, monkeypatch, WITH_AND_WITHOUT)
    assert place(found, CODED) < place(found, "all-reduce")


def test_on_one_machine_no_codec_is_tried_unless_the_user_names_it():
    found, said = candidates(4)
    assert all("codec" not in one.algorithm for one in found)
    assert any(one.startswith(f"{CODED}, because encoding gradients takes longer") for one in said)
    named, said = candidates(4, [CODED])
    assert {one.algorithm for one in named} == {CODED}
    assert not any("codec" in one for one in said)
