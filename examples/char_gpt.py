"""A small GPT on characters, trained as such loops are written; two lines make it one worker of a run.

    python examples/char_gpt.py [ITERATIONS]
    paceline launch examples/char_gpt.py:train --workers 2 --algorithm all-reduce
    torchrun --standalone --nproc-per-node 2 examples/char_gpt.py [ITERATIONS]

The text is Python's own reference, from its standard library. With CHAR_GPT_CHECKPOINT=FILE the loop saves itself there,
and goes on from there when it is started again.

The loop draws its batches from the global generator, seeded alike on all workers: inside `attach` they draw apart. It asks
`worker.progress` which iteration it is at, so that its learning rate and its end come after as many samples as with one
worker. Workers in lockstep make an iteration together, each a part of its accumulation; others make one each.
"""

import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl

LENGTH, WIDTH, HEADS, LAYERS = 16, 16, 4, 1  # characters that the model sees; its size
BATCH, ACCUMULATION = 1, 4  # sequences; batches of an iteration
ITERATIONS = int(sys.argv[1]) if sys.argv[0].endswith("char_gpt.py") and len(sys.argv) > 1 else 6000
RATE, MOMENTUM, WARM_UP, CLIP = 3e-3, 0.9, 100, 1.0
EVALUATE_EVERY = 1000
CHECKPOINT = os.environ.get("CHAR_GPT_CHECKPOINT")

text = "".join(topics[name] for name in sorted(topics))
alphabet = sorted(set(text))
data = torch.tensor([alphabet.index(one) for one in text])
train_data, validation_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


class Block(nn.Module):
    """Attention to what came before, then two layers; each adds to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width), and so is what comes out."""
        parts = self.query_key_value(self.norm_1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).split(HEADS, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder of characters, whose first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(alphabet), bias=False)
        self.head.weight = self.character.weight
        for one in self.parameters():
            if one.dim() > 1:
                nn.init.normal_(one, std=0.02)

    def forward(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each of `following` (batch, length) from all of `x` (batch, length) up to its place."""
        x = self.character(x) + self.place(torch.arange(x.shape[1]))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), following.flatten())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (batch, length) from anywhere in the text, and the same one character later."""
    places = torch.randint(len(train_data) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH)
    return train_data[places], train_data[places + 1]


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Nats per character of the last tenth of the text, which nothing is trained on; chance is 4.6."""
    length = (len(validation_data) - 1) // LENGTH * LENGTH
    model.eval()
    loss = model(validation_data[:length].view(-1, LENGTH), validation_data[1 : length + 1].view(-1, LENGTH)).item()
    model.train()
    return loss


def make_optimizer(model: nn.Module, momentum: float = MOMENTUM) -> torch.optim.Optimizer:
    """AdamW, which lets matrices decay and nothing else."""
    groups = [[one for one in model.parameters() if (one.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    settings = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=RATE, betas=(momentum, 0.99))


def schedule(iteration: int, iterations: int) -> float:
    """The share of the highest rate: warm-up, then a cosine down to a tenth."""
    if iteration < WARM_UP:
        return (iteration + 1) / WARM_UP
    done = min(1.0, (iteration - WARM_UP) / max(1, iterations - WARM_UP))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def train(
    iterations: int = ITERATIONS,
    seed: int = 1337,
    checkpoint: str | None = CHECKPOINT,
    rate: float = RATE,
    momentum: float = MOMENTUM,
) -> nn.Module:
    torch.manual_seed(seed)
    model = GPT()
    optimizer = make_optimizer(model, momentum)
    first = 0
    if checkpoint is not None and Path(checkpoint).exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]
        torch.set_rng_state(saved["random"])

    with pl.attach(model, optimizer) as worker:
        accumulation = ACCUMULATION // worker.num_workers if worker.algorithm.lockstep else ACCUMULATION
        steps = 0
        while (iteration := first + worker.progress // (BATCH * ACCUMULATION)) < iterations:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(iteration, iterations)
            for _ in range(accumulation):
                x, following = get_batch()
                loss = model(x, following)
                (loss / accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            if steps % EVALUATE_EVERY == 0 and worker.worker_id == 0:
                print(f"iteration {iteration}: validation loss {validation_loss(model):.3f}", flush=True)
                if checkpoint is not None:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**states, "iteration": iteration + 1, "random": torch.get_rng_state()}, checkpoint)

    if worker.worker_id == 0:
        print(f"validation loss {validation_loss(model):.3f}, {worker.num_workers} workers", flush=True)
    return model


if __name__ == "__main__":
    train()
