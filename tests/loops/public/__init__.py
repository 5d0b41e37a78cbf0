"""Loops in the manner of PyTorch's public examples, with the two lines; written from their habits.

Each module has `loop(attach, ..., folder)`, which trains and returns what is left to learn (lower is better) of the model it
leaves; `SIZES`, its arguments in the quick tests and in marathons; and `TAKES`, its lines beyond the two, with their reasons.
`attach` is `paceline.attach`, or `plain_attach` of the habits, under which the same loop is plain PyTorch.
"""

import importlib
import pkgutil
import tempfile

from torch.utils.data import Subset, TensorDataset

import paceline as pl
from paceline.tasks import load_task

NAMES = [one.name for one in pkgutil.iter_modules(__path__)]
# Not downpour and adaptive-revision, whose servers have a rule of their own in place of the loop's optimizer.
REPRESENTATIVES = ["all-reduce", "local-sgd(period=3)", "hogwild", "leashed", "ad-psgd", "parameter-server(mode=async)"]


def module_of(name):
    return importlib.import_module(f"loops.public.{name}")


def meant_for(name):
    """The representatives of the families that a loop is meant for."""
    of_two_optimizers = ["all-reduce", "local-sgd(period=3)", "hogwild", "leashed"]
    return of_two_optimizers if name == "dcgan" else REPRESENTATIVES


def length_of(settings):
    """The setting that says how long a loop trains."""
    return "episodes" if "episodes" in settings else "epochs"


def run(name, attach, settings):
    """What one loop returns, with a folder of its own for its files."""
    with tempfile.TemporaryDirectory() as folder:
        return module_of(name).loop(attach, **settings, folder=folder)


def datasets(task, samples):
    """Training and test images (samples, channels, height, width): the task's if its data are there, else small digits."""
    try:
        if task is None:
            raise pl.UsageError("the digits are meant")
        both = load_task(task).load()
    except pl.UsageError:
        digits = load_task("digits-mlp").load()  # other tests may have the same
        both = [TensorDataset(one.tensors[0].view(-1, 1, 8, 8), one.tensors[1]) for one in digits]
    return [
        Subset(one, range(min(number, len(one)))) for one, number in zip(both, (samples, samples // 2), strict=True)
    ]


def tensors_of(subset):
    return subset.dataset[: len(subset)]
