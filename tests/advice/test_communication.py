"""Whether a codec pays: the inequality against simulated steps, and what is advised on slow and on fast networks."""

import re

import pytest

import paceline as pl
from advice.planted import Law, Planted
from paceline.advice.advise import advise
from paceline.advice.answer import Candidate, Circumstances, Target
from paceline.advice.communication import CODED, balance, weighed, words
from paceline.advice.program import Shape
from paceline.simulator import Cluster

SHAPE = Shape(num_parameters=3_000_000, batch_size=10)
SLOW, FAST = 12.5e6, 12.5e9  # bytes/s: 100 Mbit/s, 100 Gbit/s
METHODS = ("sequential", "all-reduce", "local-sgd", "da-sgd", "diloco(period=20)")


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


def advice(cluster, tmp_path, monkeypatch, algorithms=None):
    monkeypatch.setattr("paceline.advice.candidates.DEFAULT", METHODS)
    file = cluster.save(tmp_path / "cluster.toml")
    return advise(
        OnANetwork(), target=Target(accuracy=0.9), circumstances=Circumstances(cluster=file), algorithms=algorithms,
        max_workers=cluster.workers, processes=0,
    )  # fmt: skip


def place(found, algorithm):
    """Of the best number of workers."""
    return next(number for number, one in enumerate(found.ranked) if one.candidate.algorithm == algorithm)


def test_on_a_slow_network_less_communication_is_advised_and_it_is_said_why(tmp_path, monkeypatch):
    found = advice(Cluster(workers=4, compute_s=0.05, bandwidth_bytes_per_s=SLOW), tmp_path, monkeypatch)
    assert found.best.candidate == Candidate(algorithm="diloco(period=20)", workers=4)
    order = [place(found, one) for one in ("da-sgd", *CODED, "all-reduce")]
    assert place(found, CODED[0]) < place(found, "all-reduce")
    assert max(order) == order[-1], "whatever sends less comes before all-reduce"
    why = found.reasons[-1]
    assert re.search(r"4 workers a mean of 12\.0 MB takes 1\.44 s over links of 100 Mbit/s", why), why
    assert re.search(r"coding takes (\d+\.\d ms): \1 < 1\.44 s - 183 ms\.", why), why
    assert "diloco" in why


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(workers=4, compute_s=0.1, bandwidth_bytes_per_s=FAST),
        Cluster(workers=2, compute_s=0.1, cores=4),
    ],
    ids=["a fast network", "one machine"],
)
def test_where_bytes_are_cheap_no_codec_is_tried_and_it_is_said_why(cluster, tmp_path, monkeypatch):
    found = advice(cluster, tmp_path, monkeypatch)
    assert found.best.candidate.algorithm == "all-reduce"
    assert all("codec" not in one.candidate.algorithm for one in found.ranked)
    assert len(found.reasons) == 1
    (why,) = (one for one in found.not_tried if one.startswith(f"Not tried: {CODED[0]}: a codec pays where"))
    assert re.search(r"coding takes (\d+\.\d ms): \1 > ", why), why


def test_a_codec_that_the_user_names_is_compared_and_the_figures_are_said(tmp_path, monkeypatch):
    cluster = Cluster(workers=4, compute_s=0.1, bandwidth_bytes_per_s=FAST)
    found = advice(cluster, tmp_path, monkeypatch, ["all-reduce", "all-reduce(codec=sign)"])
    assert place(found, "all-reduce") < place(found, "all-reduce(codec=sign)")
    assert found.reasons[-1].startswith("all-reduce(codec=sign): a codec pays where")
    assert not any("Not tried: all-reduce" in one for one in found.not_tried)


@pytest.mark.parametrize("bandwidth", [SLOW, 1e8, 1.25e9, FAST])
@pytest.mark.parametrize("workers", [2, 4, 5])
@pytest.mark.parametrize("codec", ["qsgd", "sign", "fp16"])
def test_the_inequality_is_what_simulated_steps_differ_by(codec, workers, bandwidth):
    """With next to no computing, behind which nothing hides; a bucket may be coded while another travels, which hides more.

    To a tenth of the larger of both sides.
    """
    cluster = Cluster(workers=workers, compute_s=1e-6, bandwidth_bytes_per_s=bandwidth, latency_s=1e-6)
    spec = f"all-reduce(codec={codec})"
    one = balance(spec, cluster, SHAPE, workers)
    differ_s = step_s("all-reduce", cluster) - step_s(spec, cluster)
    gained_s = one.plain_s - one.coded_s - one.coding_s
    slack_s = 0.1 * max(one.plain_s, one.coding_s)
    assert gained_s - slack_s < differ_s < gained_s + min(one.coded_s, one.coding_s) + slack_s
    assert one.pays == (gained_s > 0)


def test_measured_speeds_of_codecs_decide():
    cluster = Cluster(workers=4, bandwidth_bytes_per_s=1.25e9)
    assert not balance(CODED[0], cluster, SHAPE, 4).pays
    fast = Cluster(workers=4, bandwidth_bytes_per_s=1.25e9, codecs=(("qsgd", 1e13, 1e13),))
    slow = Cluster(workers=4, bandwidth_bytes_per_s=SLOW, codecs=(("qsgd", 1e7, 1e7),))
    assert balance(CODED[0], fast, SHAPE, 4).coding_s < 0.5 * balance(CODED[0], cluster, SHAPE, 4).coding_s
    assert not balance(CODED[0], slow, SHAPE, 4).pays


def test_this_machine_before_it_is_measured():
    """Its workers share its memory: no codec pays, whatever its seconds, and none are named."""
    candidates = [Candidate(algorithm="all-reduce", workers=m) for m in (2, 4)]
    more, why, (why_not,) = weighed(None, 4, None, candidates, None)
    assert (more, why) == ([], [])
    assert re.search(r"over this machine's memory qsgd takes \d\.\d times as long as what it saves", why_not)
    assert weighed(None, 4, None, candidates, ["all-reduce"]) == ([], [], [])
    assert weighed(None, 4, None, [Candidate(algorithm="sequential", workers=1)], None) == ([], [], [])


def test_means_that_hide_behind_computing_are_said_to():
    cluster = Cluster(workers=2, compute_s=10.0, bandwidth_bytes_per_s=SLOW)
    assert "behind which much of the mean may hide" in words(balance(CODED[0], cluster, SHAPE, 2))
