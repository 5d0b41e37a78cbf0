"""mnist: a convolutional classifier with dropout, Adadelta and StepLR, tested after each epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from loops.public import datasets, tensors_of

SIZES = {
    "quick": {"task": None, "samples": 1024, "epochs": 2, "batch": 32},
    "soak": {"task": "mnist-cnn", "samples": 8000, "epochs": 5, "batch": 64},
}
TAKES = {
    "if worker.worker_id == 0:": "every worker runs the loop, including the tests; one prints",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.linear_1, self.linear_2 = nn.Linear(16 * 16, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv_2(F.relu(self.conv_1(x))))
        x = F.dropout(F.adaptive_max_pool2d(x, 4).flatten(1), 0.25, self.training)
        return F.log_softmax(self.linear_2(F.dropout(F.relu(self.linear_1(x)), 0.5, self.training)), dim=1)


def share_wrong(model, images):
    x, y = tensors_of(images)
    model.eval()
    with torch.no_grad():
        wrong = (model(x).argmax(1) != y).float().mean().item()
    model.train()
    return wrong


def loop(attach, task, samples, epochs, batch, folder=None):
    torch.manual_seed(1)
    images, test_images = datasets(task, samples)
    loader = DataLoader(images, batch_size=batch, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    with attach(model, optimizer) as worker:
        for epoch in range(epochs):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = F.nll_loss(model(x), y)
                loss.backward()
                optimizer.step()
            wrong = share_wrong(model, test_images)
            if worker.worker_id == 0:
                print(f"epoch {epoch}: {100 * wrong:.1f} % wrong")
            scheduler.step()
    return share_wrong(model, test_images)
