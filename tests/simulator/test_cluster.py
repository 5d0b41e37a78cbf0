"""Clusters: compute times, files, and what is refused."""

import dataclasses
import itertools
from random import Random

import pytest

from paceline.errors import UsageError
from paceline.simulator import Cluster, Constant, ExponentialTail, Normal, Pareto, Recorded, Sockets

MODELS = [
    Constant(time_s=0.02),
    Normal(average_s=0.01, deviation_s=0.002),
    ExponentialTail(least_s=0.01, tail_s=0.005),
    Pareto(least_s=0.01, shape=4.0),
    Recorded(times_s=(0.01, 0.03, 0.02)),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_means_and_repeatability(model):
    drawn = list(itertools.islice(model.draws_s(Random(1)), 30_000))
    assert sum(drawn) / len(drawn) == pytest.approx(model.mean_s, rel=0.02)
    assert min(drawn) > 0
    assert drawn == list(itertools.islice(model.draws_s(Random(1)), 30_000))


def test_normal_is_truncated_above_zero():
    assert min(itertools.islice(Normal(average_s=0.001, deviation_s=0.01).draws_s(Random(0)), 10_000)) > 0


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("model", [0.004, *MODELS], ids=str)
def test_file_round_trip(tmp_path, suffix, model):
    cluster = (
        Cluster(workers=5, compute_s=model, switch_bytes_per_s=4e9, collective="tree", sockets=Sockets(cores=3, used=1))
        .slow(worker=3, factor=10)
        .slow(worker=0, factor=2)
        .slow_link(4, 1, 10)
        .slow_link(0, 1, 2)
    )
    cluster = dataclasses.replace(cluster, traces=((2, (0.1, 0.2)), (4, (0.3,))))
    assert cluster.link_factors == ((0, 1, 2.0), (1, 4, 10.0))
    assert Cluster.load(cluster.save(tmp_path / f"cluster{suffix}")) == cluster


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compute_ms = 3", "unknown name 'compute_ms'. Did you mean 'compute_s'?"),
        ("bus_gbytes_per_s = 3", "Did you mean 'bus_bytes_per_s'?"),
        ("worker = 3", "Did you mean 'workers'?"),
        ("workers = 0", "workers must be 1 or more, not 0"),
        ("workers = 2.5", "workers must be a whole number, not 2.5"),
        ("atomic_s = 0", "atomic_s of Cluster must be a number above 0"),
        ("compute_s = 'normall'", "Did you mean 'normal'?"),
        ("compute_s = 'normal(average_ms=3)'", "average_s"),
        ("compute_s = []", "at least one number"),
        ("compute_s = 'pareto(shape=1.0)'", "shape of Pareto must be a number above 1, not 1.0"),
        ("workers = 2\n[slow]\n2 = 10", "Worker 2 cannot be slow"),
        ("[slow]\nfirst = 10", "maps workers to factors"),
        ("workers", "not valid TOML"),
        ("latency_us = 50", "unknown name 'latency_us'. Did you mean 'latency_s'?"),
        ("bandwidth_gbit_per_s = 10", "Did you mean 'bandwidth_bytes_per_s'?"),
        ("switch_bytes_per_s = 0", "switch_bytes_per_s of Cluster must be 0.001 or more, not 0"),
        ("latency_s = -1", "latency_s of Cluster must be 0 or more, not -1"),
        ("collective = 'rings'", "not 'rings'. Did you mean 'ring'?"),
        ("workers = 2\n[slow_link]\n'0-2' = 10", "Link 0-2 cannot be slow"),
        ("workers = 2\n[slow_link]\n'1-1' = 10", "Link 1-1 cannot be slow"),
        ("[slow_link]\nfirst = 10", "maps links to factors"),
        ("workers = 2\n[traces]\n2 = [0.1]", "Worker 2 cannot be given compute times"),
        ("[traces]\n0 = 0.1", "maps workers to lists of compute times"),
        ("[traces]\n0 = []", "at least one number"),
        ("[codecs]\nqsgd = 1e9", "maps codecs to the bytes that they encode and decode per second, such as qsgd = "),
        ("[codecs]\nqsdg = [1e9, 2e9]", "Unknown codec 'qsdg'. Did you mean 'qsgd'"),
        ("[codecs]\npower = [1e9, 2e9]", "The speed of codec power cannot be measured: leave it out"),
        ("[codecs]\nqsgd = [0, 2e9]", "What qsgd codes in a second must be"),
        ("[codecs]\nqsgd = [1e9, 'x']", "What qsgd decodes in a second must be a number, not 'x'"),
        ("[slow_links]\n'0-1' = 10", "Did you mean 'slow_link'?"),
        ("[sockets]\ncore = 10", "[sockets] has an unknown name 'core'. Did you mean 'cores'?"),
        ("[sockets]\nfar_atomic_ns = 10", "Did you mean 'far_atomic_s'?"),
        ("[sockets]\ncores = 1.5", "cores of Sockets must be a whole number, not 1.5"),
        ("[sockets]\nused = 3", "sockets.used is 3, but there are 2 sockets"),
        ("[sockets]\nremote_factor = 0.5", "remote_factor of Sockets must be 1 or more, not 0.5"),
        ("[sockets]\ngradient_bytes = 2e8", "one core moves only 1e+08 bytes in compute_s"),
        ("sockets = 2", "'sockets' is a table, such as count = 2 under [sockets]"),
    ],
)
def test_refused_files(refusal, text, says):
    assert says in refusal(text)


def test_missing_file_and_wrong_suffix(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        Cluster.load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"\.toml or \.json"):
        Cluster.load(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"workers": "four"}', "workers must be a whole number, not 'four'"),
        ('{"compute_s": "x"}', "Unknown compute time 'x'"),
        ('{"compute_s": ["a"]}', "Each time of a recorded trace must be a number, not 'a'"),
        ('{"wake_s": null}', "wake_s of Cluster must be a number, not None"),
        ('{"slow": {"0": -2}}', "The slowness of worker 0 must be a number above 0, not -2"),
        ('{"slow_link": {"0-1": "x"}}', "The slowness of link 0-1 must be a number, not 'x'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_file_and_the_name(tmp_path, text, says):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        Cluster.load(path)
    assert str(refused.value).startswith(f"The cluster file {path}: ")
    assert says in str(refused.value)
