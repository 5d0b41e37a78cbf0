"""Plain SGD, and the same loop attached to nothing: the parameters come out equal, bit for bit.

    python examples/sequential.py [EPOCHS]

This is what makes the other examples comparable: `attach` alone changes nothing.
"""

import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def plain() -> nn.Module:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def attached() -> nn.Module:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with pl.attach(model, optimizer, algorithm="sequential") as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)  # as every worker of `pl.launch` has; on a busy machine two are slower on small layers
    one, other = plain(), attached()
    equal = all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    print(f"plain loop    test accuracy {accuracy(one):.3f}")
    print(f"under attach  test accuracy {accuracy(other):.3f}")
    print(f"parameters    {'equal bit for bit' if equal else 'NOT EQUAL'}")
