"""The digits with a small model that has buffers."""

import dataclasses

from torch import nn

from paceline.tasks import load_task

SMALL = f"{__file__}:small"


def small():
    return dataclasses.replace(load_task("digits-mlp"), name="small", model=model, epochs=1.0)


def model():
    return nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
