"""Fingerprints of what a run computes with, its task's file and its training set: a replay compares them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.system import files

_MOST_SAMPLES = 1000  # that are read for a fingerprint, evenly spaced


def inputs_of(task: str, train_set: Dataset[Any]) -> dict[str, Any]:
    """The entry `inputs` of a result: `script` (SHA-256 of the task's file; None: it is built in), `samples`, and `data`.

    `data` is the SHA-256 of some samples; None if the set is no `TensorDataset`, whose samples do not depend on chance.
    """
    num_samples = len(train_set)  # type: ignore[arg-type]
    data = None
    if type(train_set) is TensorDataset and all(one.layout == torch.strided for one in train_set.tensors):
        digest = hashlib.sha256()
        places = torch.linspace(0, num_samples - 1, min(num_samples, _MOST_SAMPLES)).long()
        for tensor in train_set.tensors:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor[places].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        data = digest.hexdigest()
    return {"script": source_digest(task), "samples": num_samples, "data": data}


def source_of(what: str | Callable[[], Any]) -> Path | None:
    """The file of a task, or that which defines a function or from which `paceline launch` has loaded it; None: no file."""
    while isinstance(what, partial):
        what = what.func
    try:
        if isinstance(what, str):
            path = Path(what.rpartition(":")[0])
        else:
            path = Path(getattr(what, "path", None) or inspect.getsourcefile(inspect.unwrap(what)) or "")
    except TypeError:  # an object that can be called, say
        return None
    return path if path.is_file() else None


def source_digest(what: str | Callable[[], Any]) -> str | None:
    """The SHA-256 of that file; None: there is none."""
    path = source_of(what)
    return files.digest_of(path) if path is not None else None
