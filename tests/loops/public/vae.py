"""vae: a variational autoencoder used by its parts, with a loss summed over the batch and printed per sample."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from loops.public import datasets, tensors_of

SIZES = {
    "quick": {"task": None, "samples": 1024, "epochs": 2},
    "soak": {"task": "mnist-cnn", "samples": 8000, "epochs": 5},
}
TAKES = {
    "worker.sum(train_loss)": "a worker sums over its own batches, but divides by the length of the whole data set",
    "if worker.worker_id == 0:": "every worker runs the loop; one prints",
}


class VAE(nn.Module):
    def __init__(self, pixels, hidden=128, codes=10):
        super().__init__()
        self.hidden, self.mean, self.log_variance = (
            nn.Linear(pixels, hidden),
            nn.Linear(hidden, codes),
            nn.Linear(hidden, codes),
        )
        self.back, self.out = nn.Linear(codes, hidden), nn.Linear(hidden, pixels)

    def encode(self, x):
        hidden = F.relu(self.hidden(x))
        return self.mean(hidden), self.log_variance(hidden)

    def draw(self, mean, log_variance):
        return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)

    def decode(self, z):
        return torch.sigmoid(self.out(F.relu(self.back(z))))


def loss_of(model, x):
    """Summed over the samples of `x`: what is lost of them, and how far the codes are from a normal distribution."""
    x = x.flatten(1)
    mean, log_variance = model.encode(x)
    z = model.draw(mean, log_variance) if model.training else mean
    lost = F.binary_cross_entropy(model.decode(z), x, reduction="sum")
    return lost - 0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())


def test_loss(model, images):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, tensors_of(images)[0]).item() / len(images)
    model.train()
    return loss


def loop(attach, task, samples, epochs, folder=None):
    torch.manual_seed(1)
    images, test_images = datasets(task, samples)
    loader = DataLoader(images, batch_size=32, shuffle=True)
    model = VAE(images[0][0].numel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with attach(model, optimizer) as worker:
        for epoch in range(epochs):
            train_loss = 0.0
            for x, _ in worker.batches(loader):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                train_loss += loss.item()
                optimizer.step()
            train_loss = worker.sum(train_loss) / len(loader.dataset)
            if worker.worker_id == 0:
                print(f"epoch {epoch}: {train_loss:.1f}, test {test_loss(model, test_images):.1f}")
    return test_loss(model, test_images)
