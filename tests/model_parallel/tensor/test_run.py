"""`attach(layout=...)` in `launch`: steps are those of one process; across replicas, of the algorithm alone."""

from functools import partial

import pytest
import torch

import paceline as pl
from chosen import soaked
from model_parallel.tensor.run_loops import alone, check_same, found, last_steps, loop
from paceline.model_parallel.tensor.worker_part import WorkerPart
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files

PROCESSES = [
    (pl.TensorParallel(line=3), 3, 1, "adamw"),
    (pl.TensorParallel(line=2), 4, 2, "momentum"),
    (pl.TensorParallel(q=2), 4, 1, "momentum"),
    (pl.TensorParallel(q=2, depth=2, mode="summa"), 8, 1, "adamw"),
]
THREADS = [
    (pl.TensorParallel(line=2), 2, 1, "momentum"),
    (pl.TensorParallel(line=2), 6, 3, "adamw"),
    (pl.TensorParallel(line=1), 2, 2, "momentum"),
    (pl.TensorParallel(q=1, depth=2), 2, 1, "adamw"),
    (pl.TensorParallel(q=2), 8, 2, "adamw"),
    (pl.TensorParallel(q=2, depth=2), 8, 1, "momentum"),
    (pl.TensorParallel(q=2, mode="summa"), 8, 2, "adamw"),
    (pl.TensorParallel(q=1, depth=2, mode="summa"), 2, 1, "momentum"),
    (pl.TensorParallel(q=3, mode="summa"), 9, 1, "momentum"),
]


def launched(out, layout, workers, *, backend="threads", launch=None, **settings):
    out.mkdir(exist_ok=True)
    return pl.launch(partial(loop, layout, out, **settings), workers=workers, backend=backend, **(launch or {}))


@pytest.mark.parametrize(
    ("backend", "layout", "workers", "replicas", "optimizer"),
    [("processes", *one) for one in PROCESSES] + [("threads", *one) for one in THREADS],
    ids=str,
)
def test_three_steps_with_dropout_and_clipping_are_one_process(
    backend, layout, workers, replicas, optimizer, tmp_path, nothing_left
):
    run = launched(tmp_path, layout, workers, backend=backend, optimizer=optimizer, replicas=replicas)
    expected = alone(optimizer, replicas=replicas)
    for worker in range(workers):
        one = found(tmp_path, worker)
        check_same(one, expected, replicas=replicas, replica=worker * replicas // workers)
        rows, columns = one["shapes"]["blocks.0.mlp.wide.weight"]
        shares = layout.line or layout.q**2
        assert (rows * columns, rows) == (96 * 24 // shares, 96 // (layout.line or layout.q))
    assert (run.result["steps"], run.result["samples"]) == (3, 36 * replicas), "each sample counts once"
    assert run.result["waits_for"] == ("everyone" if layout.line == 1 else None), "within groups, if it divides tensors"
    assert sum(run.result["batches_" + what] for what in ("repeated", "missed")) == 0


@pytest.mark.parametrize(
    ("layout", "replicas", "bucket_bytes", "accumulates"),
    [(pl.TensorParallel(q=2, depth=2), 1, 3000, True)]
    + [
        (pl.TensorParallel(q=1, depth=2), 2, size, accumulates)
        for size in (3000, None)
        for accumulates in (False, True)
    ],
    ids=str,
)
def test_passes_accumulate_whatever_the_buckets(layout, replicas, bucket_bytes, accumulates, tmp_path):
    """Small buckets come back within backward, and are then handed out across replicas."""
    workers = layout.shape.workers * replicas
    settings = {"bucket_bytes": bucket_bytes, "passes": 2, "accumulates": accumulates, "dropout": 0.0}
    launched(tmp_path, layout, workers, replicas=replicas, **settings)
    expected = alone(replicas=replicas, dropout=0.0)
    for worker in range(workers):
        check_same(found(tmp_path, worker), expected, replicas=replicas, replica=worker * replicas // workers)


def test_under_local_sgd_sums_are_no_change_of_the_loops(tmp_path):
    """No ClippingWarning, which is an error here: the loop does nothing between backward and step."""
    launched(tmp_path, pl.TensorParallel(q=1, depth=2), 4, replicas=2, algorithm="local-sgd", clip=None)
    assert found(tmp_path)["sent"][2]["depth", "all-reduce"]


ACROSS = [
    "all-reduce", "all-reduce(sharded=true)", "lockstep", "local-sgd(period=2)", "da-sgd(period=2)", "diloco(period=2)",
]  # fmt: skip
ON_A_LINE, ON_A_SQUARE = (pl.TensorParallel(line=2), 4), (pl.TensorParallel(q=2), 8)


@pytest.mark.parametrize(
    ("algorithm", "layout", "workers"),
    [(algorithm, *ON_A_LINE) for algorithm in ACROSS]
    + [(algorithm, *ON_A_SQUARE) for algorithm in ("all-reduce(sharded=true)", "local-sgd(period=2)")],
    ids=str,
)
def test_across_replicas_algorithms_do_what_they_do_without_a_layout(algorithm, layout, workers, tmp_path):
    settings = {"algorithm": algorithm, "replicas": 2, "steps": 4, "dropout": 0.0, "clip": None}
    launched(tmp_path / "plain", None, 2, **settings)
    launched(tmp_path / "cut", layout, workers, **settings)
    for worker in range(workers):
        replica = worker * 2 // workers
        check_same(found(tmp_path / "cut", worker), found(tmp_path / "plain", replica))


@pytest.mark.parametrize("algorithm", ["all-reduce(codec=qsgd(bits=4))", "local-sgd(period=1, codec=sign)"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_codec_makes_of_parameters_that_a_line_has_alike_is_alike(algorithm, is_kept, tmp_path, monkeypatch):
    """Workers of a line code other vectors, of which the gains of normalisations are a part on all of them."""
    if not is_kept:
        monkeypatch.setattr(WorkerPart, "_make_alike", lambda *_: None)
    launched(tmp_path, pl.TensorParallel(line=2), 4, algorithm=algorithm, replicas=2, clip=None)
    gains = [found(tmp_path, worker)["gains"] for worker in range(4)]
    assert all(torch.equal(*pair) for pair in zip(*gains[:2], strict=True)) is is_kept
    assert all(torch.equal(*pair) for pair in zip(*gains[2:], strict=True)) is is_kept


def test_a_codec_of_small_error_ends_near_the_exact_mean(tmp_path):
    for name, algorithm in (("exact", "all-reduce"), ("coded", "all-reduce(codec=qsgd(bits=8))")):
        run = launched(
            tmp_path / name,
            pl.TensorParallel(line=2),
            4,
            algorithm=algorithm,
            replicas=2,
            clip=None,
            optimizer="momentum",
        )
    assert 8 < run.result["bits_per_element"] < 10
    exact, coded = (found(tmp_path / name)["model"] for name in ("exact", "coded"))
    moved = sum(float((coded[name] - value).double().norm()) for name, value in exact.items())
    assert 0 < moved < 0.05 * sum(float(value.double().norm()) for value in exact.values())


def test_alone_a_layout_changes_nothing(tmp_path):
    loop(pl.TensorParallel(q=2, depth=2), tmp_path, clip=None)
    check_same(found(tmp_path), alone(clip=None), tolerance=0.0)


def test_a_round_without_a_batch_for_a_replica(tmp_path):
    settings = {"replicas": 2, "batches": 5, "dropout": 0.0, "clip": None, "epochs": 2}
    launched(tmp_path / "plain", None, 2, **settings)
    launched(tmp_path / "cut", pl.TensorParallel(line=2), 4, **settings)
    for worker in range(4):
        check_same(found(tmp_path / "cut", worker), found(tmp_path / "plain", worker // 2))


def test_a_frozen_parameter_is_cut_and_comes_back_as_it_was(tmp_path):
    launched(tmp_path, pl.TensorParallel(q=2), 4, frozen="blocks.0.mlp.wide.weight")
    expected = alone(frozen="blocks.0.mlp.wide.weight")
    for worker in range(4):
        one = found(tmp_path, worker)
        assert one["shapes"]["blocks.0.mlp.wide.weight"] == (48, 12)
        check_same(one, expected)


@pytest.mark.parametrize(
    ("algorithm", "layout", "workers", "replicas"),
    [
        ("all-reduce", pl.TensorParallel(line=2), 4, 2),
        ("da-sgd(period=2)", pl.TensorParallel(line=2), 4, 2),
        ("all-reduce", pl.TensorParallel(q=2), 4, 1),
        *soaked(("local-sgd(period=3)", pl.TensorParallel(line=2), 4, 2)),
    ],
    ids=str,
)
def test_a_resumed_run_ends_like_one_that_was_not_stopped(algorithm, layout, workers, replicas, tmp_path):
    settings = {"algorithm": algorithm, "replicas": replicas, "steps": 2, "clip": None}
    every = {"checkpoint_every_s": 0}
    launched(
        tmp_path / "whole", layout, workers, **settings, epochs=2, launch={**every, "out": tmp_path / "whole" / "run"}
    )
    part = tmp_path / "part"
    launched(part, layout, workers, **settings, epochs=1, launch={**every, "out": part / "run"})
    launched(part, layout, workers, **settings, epochs=2, launch={**every, "resume": part / "run"})
    for worker in range(workers):
        expected = found(tmp_path / "whole", worker)
        one = found(part, worker)
        assert len(one["losses"]) == 2, "the second epoch's"
        for name, value in expected["model"].items():
            torch.testing.assert_close(one["model"][name], value, rtol=0, atol=1e-12)
    saved, whole = (
        contents.load_parameters(files.newest(tmp_path / name / "run" / "checkpoint")) for name in ("part", "whole")
    )
    assert saved.version == whole.version
    assert len(saved.x) > sum(value.numel() for value in expected["model"].values()), "whole tensors, and padding"
    torch.testing.assert_close(saved.x, whole.x, rtol=0, atol=1e-12)


def test_a_run_goes_on_after_a_kill_as_if_there_had_been_none(tmp_path, nothing_left):
    """Worker 3 is killed in the last of six steps, when all have saved the beginnings of the second and third epochs."""
    layout, settings = pl.TensorParallel(q=2, mode="summa"), {"steps": 2, "epochs": 3}
    launched(tmp_path / "whole", layout, 4, **settings)
    run = {"out": tmp_path / "part" / "run", "checkpoint_every_s": 0}
    with pytest.raises(pl.WorkerLostError, match="Worker 3 was ended by signal 9"):
        launched(tmp_path / "part", layout, 4, backend="processes", **settings, kill=(3, 5), launch=run)
    saved = contents.load_parameters(files.newest(tmp_path / "part" / "run" / "checkpoint"))
    assert saved.version in (2, 4)
    launched(
        tmp_path / "part", layout, 4, backend="processes", **settings, launch={"resume": tmp_path / "part" / "run"}
    )
    for worker in range(4):
        one, other = found(tmp_path / "part", worker), found(tmp_path / "whole", worker)
        assert len(one["losses"]) == 6 - saved.version
        check_same(one, last_steps(other, 6 - saved.version))


def test_a_checkpoint_of_another_layout_is_refused(tmp_path):
    launched(tmp_path, pl.TensorParallel(line=2), 4, replicas=2, launch={"out": tmp_path / "run"})
    with pytest.raises(pl.UsageError, match=r"in place of a tensor .* Resume with the task, the layout"):
        launched(tmp_path, pl.TensorParallel(q=2), 4, epochs=2, launch={"resume": tmp_path / "run"})


def test_evaluations_are_of_the_whole_model(tmp_path):
    run = launched(
        tmp_path, pl.TensorParallel(q=2), 4, backend="processes", evaluates=True, launch={"out": tmp_path / "run"}
    )
    assert run.evaluations[-1]["test_loss"] == pytest.approx(found(tmp_path)["test loss"]["loss"], abs=1e-12)


def test_models_of_their_own_are_evaluated_as_their_mean(tmp_path):
    run = launched(
        tmp_path, pl.TensorParallel(line=2), 4, evaluates=True, replicas=2, algorithm="local-sgd(period=2)", clip=None,
        launch={"out": tmp_path / "run"},
    )  # fmt: skip
    assert run.evaluations[-1]["test_loss"] == pytest.approx(found(tmp_path)["test loss"]["loss"], abs=1e-12)
    assert run.result["consensus_distance"] > 0


@pytest.mark.parametrize(
    ("layout", "workers", "replicas"), [(pl.TensorParallel(q=2), 4, 1), (pl.TensorParallel(line=2), 4, 2)], ids=str
)
def test_a_run_that_is_stopped_ends_on_all_workers(layout, workers, replicas, tmp_path):
    run = launched(
        tmp_path, layout, workers, backend="processes", replicas=replicas, epochs=10_000, clip=None,
        launch={"limit_samples": 12 * 10},
    )  # fmt: skip
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] >= 12 * 10
    first = found(tmp_path)["model"]
    for worker in range(1, workers):
        for name, value in found(tmp_path, worker)["model"].items():
            assert torch.equal(value, first[name]) or name.endswith("calls"), "all have what the run ends with"
