"""What the examples have in common: 8x8 handwritten digits from scikit-learn's wheel, a small network, its accuracy."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_digits = load_digits()
_images = torch.tensor(_digits.data / 16, dtype=torch.float32)
_labels = torch.tensor(_digits.target)
_order = torch.randperm(len(_labels), generator=torch.Generator().manual_seed(0))
_train, _test = _order[:-360], _order[-360:]


def make_model() -> nn.Module:
    """64-64-64-10 with ReLU; the same parameters each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_loader(batch_size: int = 16) -> DataLoader:
    """1,437 training images, in a new order every epoch."""
    return DataLoader(TensorDataset(_images[_train], _labels[_train]), batch_size=batch_size, shuffle=True)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the 360 test images that the model gets right."""
    return float((model(_images[_test]).argmax(dim=1) == _labels[_test]).float().mean())
