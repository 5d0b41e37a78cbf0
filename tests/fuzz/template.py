"""What every fuzzed command line finds in its working folder: right and wrong files of every kind that it may be given."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np

from fuzz.sandbox import Sandbox

TINY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.tasks.base import Task

X = torch.linspace(-1, 1, 96).reshape(24, 4)
Y = (X.sum(1) > 0).long()

def task(train, test):
    return Task(name="tiny", model=lambda: nn.Linear(4, 2), datasets=lambda data: (train, test), batch_size=4)

def make():
    return task(TensorDataset(X, Y), TensorDataset(X, Y))

def empty():
    return task(TensorDataset(X, Y), TensorDataset(X[:0], Y[:0]))

def wrong():
    return 5

def fails():
    raise ValueError("\\x1b[31mred")

def needs(argument):
    return make()

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), X[:4]
"""
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

def go():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
    with paceline.attach(model, optimizer) as worker:
        for x, y in worker.batches(loader):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            worker.report(loss)

if __name__ == "__main__":
    go()
"""
CLUSTER = "workers = 2\ncompute_s = 0.01\n"
STUDY = 'task = "tiny.py:make"\nbackend = "simulator"\nseeds = 1\n[factors]\nworkers = [1, 2]\n[limits]\nsteps = 1\n'


def add_runs(box: Sandbox, folder: Path) -> None:
    """What only commands make: a run, a study, a key."""
    for name, words in (
        ("run", "train --task tiny.py:make --steps 2 --backend threads --out run"),
        ("study", "study run study.toml --out study"),
        ("key", "key key"),
    ):
        ended = box.run(*words.split())
        assert ended.code == 0, ended
        (box.work / name).rename(folder / name)


def make(folder: Path) -> None:
    """All but those."""
    folder.mkdir()
    texts = {
        "tiny.py": TINY, "script.py": SCRIPT, "broken.py": "def make(:\n", "cluster.toml": CLUSTER, "study.toml": STUDY,
        "deep.toml": "a = " + 3000 * "[" + 3000 * "]", "deep.json": 50_000 * "[", "odd.toml": '"wor\\u001b[31mkers" = 1\n',
        "file": "text\n", "odd.csv": 'a\x1b[31m,"i\nx",1\nb,"[/red]",2\n',
        "ratings.csv": "".join(f"u{k % 7},i{k % 5},{7 * k % 5 + 1}\n" for k in range(35)),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "folder.py").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe.py")
    noise = np.random.default_rng(0)
    for name in ("noise", "noise.py"):
        (folder / name).write_bytes(noise.bytes(2000))
    _make_data(folder, noise)


def _make_data(folder: Path, noise: np.random.Generator) -> None:
    x = noise.normal(size=(40, 5))
    y = (x.sum(1) > 0).astype(float)
    rows = [
        f"{int(label)} " + " ".join(f"{k + 1}:{value:.4f}" for k, value in enumerate(row))
        for row, label in zip(x, y, strict=True)
    ]
    (folder / "data.svm").write_text("\n".join(rows) + "\n")
    packed = gzip.compress((folder / "data.svm").read_bytes())
    (folder / "cut.svm.gz").write_bytes(packed[: len(packed) // 2])
    np.savez(folder / "data.npz", X=x, y=y)
    model = {
        "coef": np.ones((1, 5)),
        "intercept": np.zeros(1),
        "loss": np.array("log_loss"),
        "classes": np.array([0.0, 1.0]),
    }
    np.savez(folder / "model.npz", **model)
    np.savez(folder / "odd-model.npz", **{**model, "coef": np.ones((3, 5))})
    factors = {
        "user_factors": np.ones((7, 3)),
        "item_factors": np.ones((5, 3)),
        "user_biases": np.zeros(7),
        "item_biases": np.zeros(5),
    }
    names = {"users": np.array([f"u{k}" for k in range(7)]), "items": np.array([f"i{k}" for k in range(5)])}
    np.savez(folder / "ratings-model.npz", mean=np.array(3.0), **names, **factors)
    bomb = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 5), }".ljust(117)
        + b"\n"
    )
    for name, content in (("bomb.npz", bomb), ("junk.npz", b"junk")):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("X.npy", content)
            archive.writestr("y.npy", content)
