"""imagenet: a small ResNet with BatchNorm, images changed at random in the loader's processes, the best checkpoint kept."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from loops.public import datasets, tensors_of

SIZES = {
    "quick": {"task": None, "samples": 512, "epochs": 2, "loaders": 0},
    "soak": {"task": "cifar10-cnn", "samples": 4000, "epochs": 6, "loaders": 2},
}
TAKES = {
    "if worker.worker_id == 0 and right > best:": "every worker runs the loop; one writes the file",
    "if worker.worker_id == 0 and epochs:": "the weights that worker 0 loads become the run's result",
}


class Changed(Dataset):
    """Images, shifted by up to a pixel and mirrored where they have colours, at random."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        x, y = self.images[number]
        x = torch.roll(x, torch.randint(-1, 2, (2,)).tolist(), (1, 2))
        return (x.flip(2) if len(x) == 3 and torch.rand(()) < 0.5 else x), y


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv_2, self.norm_2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x))))))


def made(channels):
    layers = [Block(channels, 8, 1), Block(8, 16, 2), Block(16, 32, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def share_right(model, images):
    x, y = tensors_of(images)
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def loop(attach, task, samples, epochs, loaders, folder):
    torch.manual_seed(2)
    images, validation_images = datasets(task, samples)
    loader = DataLoader(Changed(images), batch_size=32, shuffle=True, num_workers=loaders)
    model = made(len(images[0][0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, epochs - 1), gamma=0.1)
    best, file = 0.0, Path(folder) / "best.pt"
    with attach(model, optimizer) as worker:
        for epoch in range(epochs):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step()
            right = share_right(model, validation_images)
            if worker.worker_id == 0 and right > best:
                best = right
                torch.save({"epoch": epoch + 1, "best": best, "model": model.state_dict()}, file)
        if worker.worker_id == 0 and epochs:
            model.load_state_dict(torch.load(file)["model"])
    return 1 - share_right(model, validation_images)
