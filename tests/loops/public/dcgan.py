"""dcgan: a generator and a discriminator, with convolutions and BatchNorm, each with Adam, that step in turn."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from loops.public import datasets, tensors_of

SIZES = {"quick": {"samples": 512, "epochs": 4}, "soak": {"samples": 1500, "epochs": 12}}
TAKES = {
    "attach((generator, discriminator), [opt_g, opt_d])": "both models and both optimizers belong to one run; each of their"
    " steps is a step of the run",
    "if worker.worker_id == 0:": "every worker runs the loop; one prints",
}
CODES = 8


def made_generator():
    first, last = nn.ConvTranspose2d(CODES, 32, 4, bias=False), nn.ConvTranspose2d(32, 1, 4, 2, 1)
    return nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), last, nn.Sigmoid())


def made_discriminator():
    return nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4), nn.Flatten(0))


def noise(number):
    return torch.randn(number, CODES, 1, 1)


def distance(generator, images):
    """The energy distance between what is generated and what is real; 0: they cannot be told apart."""
    real = tensors_of(images)[0].flatten(1)
    generator.eval()
    with torch.no_grad():
        codes = torch.randn(len(real), CODES, 1, 1, generator=torch.Generator().manual_seed(9))
        made = generator(codes).flatten(1)
    generator.train()
    return (2 * torch.cdist(real, made).mean() - torch.cdist(real, real).mean() - torch.cdist(made, made).mean()).item()


def loop(attach, samples, epochs, folder=None):
    torch.manual_seed(999)
    images, test_images = datasets(None, samples)
    loader = DataLoader(images, batch_size=32, shuffle=True, drop_last=True)
    generator, discriminator = made_generator(), made_discriminator()
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loss_of = F.binary_cross_entropy_with_logits
    with attach((generator, discriminator), [opt_g, opt_d]) as worker:
        for epoch in range(epochs):
            for real, _ in worker.batches(loader):
                discriminator.zero_grad()
                loss_of(discriminator(real), torch.ones(len(real))).backward()
                made = generator(noise(len(real)))
                loss_of(discriminator(made.detach()), torch.zeros(len(real))).backward()
                opt_d.step()
                generator.zero_grad()
                loss_of(discriminator(made), torch.ones(len(real))).backward()
                opt_g.step()
            if worker.worker_id == 0:
                print(f"epoch {epoch}: distance {distance(generator, test_images):.2f}")
    return distance(generator, test_images)
