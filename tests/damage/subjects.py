"""What is damaged: folders as Paceline leaves them and files as users have them, small, and the verbs that read them."""

import gzip
from pathlib import Path

import numpy as np

import paceline as pl
from paceline.integrations import sparse_jobs as jobs
from paceline.records import checkpoint_files
from paceline.records.run_data import RunData
from paceline.records.step_record import shift_times
from paceline.simulator import Cluster
from paceline.study.report import write_report
from paceline.study.runner import run_study
from paceline.study.study_file import Limits, Study

SAMPLES = 24


def finished_run(folder):
    """Three workers that have models of their own."""
    config = pl.TrainConfig(algorithm="ad-psgd", workers=3, steps=10, backend="threads", batch_size=32)
    pl.train(config, out=folder / "run")


def killed_run(folder):
    """With events as a killed supervisor leaves them, and two complete checkpoints."""
    config = pl.TrainConfig(algorithm="leashed", workers=2, steps=10, backend="threads", batch_size=32)
    run = folder / "run"
    pl.train(config, out=run)
    pl.train(pl.TrainConfig(**{**vars_of(config), "steps": 20}), resume=run)
    newest = checkpoint_files.newest(run / "checkpoint")
    for worker, rows in RunData.load(run).records.items():
        shift_times(rows, checkpoint_files.describe(newest)["started_s"])
        (run / f"events-{worker}.bin").write_bytes(rows.tobytes() + b"cut off")
        (run / f"events-{worker}.jsonl").unlink()
    for name in ("result.json", "trace.json", "report.html"):
        (run / name).unlink()


def vars_of(config):
    return {name: getattr(config, name) for name in ("algorithm", "workers", "steps", "backend", "batch_size")}


def served_run(folder):
    """Of a parameter server with two shards and momentum, whose state the servers save."""
    config = pl.TrainConfig(
        algorithm="parameter-server(shards=2)", workers=2, steps=10, backend="threads", batch_size=32, momentum=0.9
    )
    pl.train(config, out=folder / "run")


def study(folder):
    """Of simulated workers, with a report."""
    small = Study(
        name="small",
        backend="simulator",
        timing_only=True,
        parameters=1000,
        factors={"algorithm": ("hogwild", "leashed"), "workers": (1, 2)},
        seeds=(0, 1),
        limits=Limits(steps=4),
    )
    run_study(small, folder / "study")
    write_report(folder / "study")


def cluster(folder):
    described = Cluster(workers=3, compute_s=0.01, cores=2).slow(worker=1, factor=3.0).slow_link(0, 2, 4.0)
    described.save(folder / "cluster.toml")
    described.save(folder / "cluster.json")


def linear(folder):
    """The same examples as svmlight, gzipped too, as dense and as sparse NPZ; and a model of them."""
    draws = np.random.default_rng(0)
    X, y = draws.normal(size=(SAMPLES, 5)).round(3), draws.integers(0, 2, SAMPLES)
    lines = [f"{label} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(row)) for label, row in zip(y, X, strict=True)]
    text = "\n".join(lines) + "\n"
    (folder / "data.svm").write_text(text)
    (folder / "data.svm.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    np.savez(folder / "dense.npz", X=X, y=y)
    rows = np.arange(0, 5 * SAMPLES + 1, 5)
    columns = np.tile(np.arange(5), SAMPLES)
    np.savez(folder / "sparse.npz", data=X.ravel(), indices=columns, indptr=rows, shape=np.array(X.shape), y=y)
    _, arrays = jobs.fit_linear(folder / "data.svm", None, lambda *_: None, **LINEAR)
    jobs.write_model(folder / "model.npz", arrays)


LINEAR = {
    "loss": "log_loss", "penalty": "l2", "learning_rate": "optimal", "discipline": "copies", "n_jobs": 1, "random_state": 0,
    "deterministic": False, "max_iter": 2, "tol": None,
}  # fmt: skip
RATINGS = {"n_jobs": 1, "random_state": 0, "deterministic": False, "max_iter": 2, "tol": None, "n_components": 2}


def ratings(folder):
    lines = [f"u{n % 7},i{n % 5},{n % 4 + 1}" for n in range(SAMPLES)]
    (folder / "data.csv").write_text("user,item,rating\n" + "\n".join(dict.fromkeys(lines)) + "\n")
    _, arrays = jobs.fit_ratings(folder / "data.csv", None, lambda *_: None, **RATINGS)
    jobs.write_model(folder / "model.npz", arrays)


def data_sets(folder):
    """MNIST and CIFAR-10 as they are read, with a few samples."""
    draws = np.random.default_rng(0)
    for part, samples in (("train", SAMPLES), ("t10k", 8)):
        for name, shape in (("images-idx3", (samples, 28, 28)), ("labels-idx1", (samples,))):
            values = draws.integers(0, 10, shape).astype(np.uint8)
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            packed = part == "train"
            path = folder / f"{part}-{name}-ubyte{'.gz' if packed else ''}"
            content = header + values.tobytes()
            path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    images = {f"{part}_images": draws.integers(0, 255, (8, 32, 32, 3)).astype(np.uint8) for part in ("train", "test")}
    labels = {f"{part}_labels": draws.integers(0, 10, 8).astype(np.uint8) for part in ("train", "test")}
    np.savez(folder / "cifar10_12k.npz", **images, **labels)


TRAIN = ["--steps", "25", "--workers", "2", "--batch-size", "32", "--backend", "threads"]
SIMULATE = ["simulate", "--timing-only", "--steps", "3", "--parameters", "1000"]
FIT = ["--passes", "2", "--n-jobs", "1"]

# name -> (makes it in a folder, the verbs; {} stands for the folder, and {out} for one to write into)
SUBJECTS = {
    "finished run": (
        finished_run,
        [
            ["train", "--resume", "{}/run", *TRAIN[:2], "--workers", "3", *TRAIN[4:]],
            ["plan", "backups", "{}/run"],
        ],
    ),
    "killed run": (killed_run, [["train", "--resume", "{}/run", *TRAIN]]),
    "served run": (served_run, [["train", "--resume", "{}/run", *TRAIN]]),
    "study": (
        study,
        [
            ["study", "table", "{}/study"],
            ["study", "compare", "{}/study"],
            ["study", "report", "{}/study"],
            ["study", "run", "{}/study/study.toml", "--out", "{}/study", "--steps", "4", "--dry-run"],
            ["study", "run", "{}/study/study.toml", "--out", "{}/study", "--steps", "4"],
        ],
    ),
    "cluster": (
        cluster,
        [
            [*SIMULATE, "--cluster", "{}/cluster.toml", "--out", "{out}"],
            [*SIMULATE, "--cluster", "{}/cluster.json", "--out", "{out}"],
        ],
    ),
    "linear": (
        linear,
        [
            *(
                ["sparse", "fit", f"{{}}/{name}", *FIT]
                for name in ("data.svm", "data.svm.gz", "dense.npz", "sparse.npz")
            ),
            ["sparse", "predict", "{}/model.npz", "{}/data.svm"],
            ["sparse", "predict", "{}/model.npz", "{}/dense.npz", "--probabilities"],
        ],
    ),
    "ratings": (
        ratings,
        [["sparse", "fit", "{}/data.csv", *FIT], ["sparse", "predict", "{}/model.npz", "{}/data.csv"]],
    ),
    "data sets": (
        data_sets,
        [
            ["simulate", "--task", "mnist-mlp", "--data", "{}", "--steps", "1", "--batch-size", "8", "--out", "{out}"],
            [
                "simulate",
                "--task",
                "cifar10-cnn",
                "--data",
                "{}",
                "--steps",
                "1",
                "--batch-size",
                "4",
                "--out",
                "{out}",
            ],
        ],
    ),
}


def reads(words, file):
    """Whether a verb reads that file of its subject, as far as its words tell: others need not be run."""
    named = [Path(word).name for word in words if word.startswith("{}/") and Path(word).suffix]
    return not named or Path(file).name in named or "study" in words


def made(name, folder):
    """The subject in a folder of its own; its verbs must all do well with it."""
    folder.mkdir()
    SUBJECTS[name][0](folder)
    return folder
