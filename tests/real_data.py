"""Real data sets that some tests read, and marks that skip those tests where the files are not there."""

import os
from pathlib import Path

import pytest

FOLDER = Path(
    os.environ.get("PACELINE_DATA") or "no-such-folder"
)  # the Makefile exports it empty where it finds no data


def needs(*files):
    """Skips a test, with the reason, unless all of these files are in the folder that PACELINE_DATA names."""
    missing = [file for file in files if not (FOLDER / file).is_file()]
    return pytest.mark.skipif(bool(missing), reason=f"PACELINE_DATA names no folder with {', '.join(missing)}")


needs_mnist = needs(
    *(f"mnist/{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3"))
)
needs_cifar10 = needs("cifar10/cifar10_12k.npz")
needs_ag_news = needs("ag_news/train.csv.gz", "ag_news/test.csv.gz")
