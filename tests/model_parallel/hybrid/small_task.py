"""A small VGG in float64 on made-up images, as a task: 52 samples, so that epochs of batches of 4 do not divide."""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from paceline.tasks import Task

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a command line
from model_parallel.hybrid.rooms import small_vgg


def datasets(_):
    generator = torch.Generator().manual_seed(11)
    images = torch.randn(72, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (72,), generator=generator)
    return TensorDataset(images[:52], labels[:52]), TensorDataset(images[52:], labels[52:])


def without_dropout():
    return Task(name="small-vgg", model=lambda: small_vgg(0.0), datasets=datasets, batch_size=4, learning_rate=0.05)


def with_dropout():
    return Task(name="small-vgg", model=small_vgg, datasets=datasets, batch_size=4, learning_rate=0.05)
