"""The timeline of a report: rounds, averages, deaths, and for whom workers wait."""

import itertools

import paceline as pl
from paceline.observe.lanes import Series, lanes

CLUSTER = pl.Cluster(workers=4, compute_s=0.02, detection_s=0.05, restart_s=0.1)


def drawn(algorithm, cluster=CLUSTER, faults=None, **more):
    config = pl.TrainConfig(algorithm=algorithm, workers=4, steps=None if "epochs" in more else 30, **more)
    run = pl.simulate_task(config, cluster=cluster, faults=faults, timing_only=True)
    figure = lanes([Series(run, "run")])
    assert figure is not None
    return figure


def marks(figure, name):
    """Lane and time of every mark."""
    traces = [trace for trace in figure.traces if trace["name"] == name]
    return [pair for trace in traces for pair in zip(trace["y"], trace["x"], strict=True)]


def test_a_death_and_its_replacement_are_in_the_window():
    figure = drawn("ad-psgd", faults=pl.Faults().kill(worker=1, step=40), epochs=2, restarts=1)
    ((died, died_ms),) = marks(figure, "worker died")
    ((replaced, replaced_ms),) = marks(figure, "worker replaced")
    assert died == replaced == "worker 1"
    assert replaced_ms - died_ms > 149  # both delays, in milliseconds
    assert "first death" in figure.layout["xaxis"]["title"]["text"]


def test_a_worker_that_is_not_replaced_has_died():
    figure = drawn("lockstep", faults=pl.Faults().kill(worker=1, step=10))
    assert [lane for lane, _ in marks(figure, "worker died")] == ["worker 1"]
    assert not marks(figure, "worker replaced")


def test_each_round_has_a_line_where_its_last_worker_comes():
    figure = drawn("all-reduce", CLUSTER.slow(worker=2, factor=4))
    at_ms = [shape["x0"] for shape in figure.layout["shapes"]]
    assert len(at_ms) > 3
    steps_ms = [after - before for before, after in itertools.pairwise(at_ms)]
    assert all(79 < step_ms < 85 for step_ms in steps_ms)
    texts = [text for trace in figure.traces if trace["name"] == "waiting" for text in trace["customdata"]]
    assert any(text.endswith("for worker 2") for text in texts)
    assert "Dotted" in figure.note


def test_averages_are_marked_and_free_workers_have_no_rounds():
    figure = drawn("local-sgd(period=4)")
    assert {lane for lane, _ in marks(figure, "models averaged")} == {f"worker {worker}" for worker in range(4)}
    figure = drawn("hogwild")
    assert not figure.layout["shapes"]
    assert not marks(figure, "models averaged")
