"""word_language_model: an LSTM with its state carried along the text, clipping, a rate that falls as validation stagnates."""

import math
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    "quick": {"words": 4000, "width": 16, "epochs": 2},
    "soak": {"words": 60_000, "width": 64, "epochs": 5},
}
TAKES = {
    "columns[:, worker.worker_id :: worker.num_workers]": "the state continues from batch to batch, so each worker reads"
    " its own columns from top to bottom; all columns on all workers would repeat the work n times, with a warning",
    "worker.mean(validation_loss(model, held_out))": "all workers reduce the rate or stop at the same epoch, even if each has"
    " its own model",
    "worker.report(loss, samples=following.numel())": "the first dimension is time, not samples: without it, two workers with"
    " half the columns each count twice the samples of one worker",
    "if worker.worker_id == 0:": "every worker runs the loop; one writes and prints",
    "optimizer = torch.optim.SGD(model.parameters(), lr=20.0)": "the original subtracts gradients from `p.data` by hand; a"
    " run's step is the optimizer's",
}
VOCABULARY, COLUMNS, LENGTH, CLIP = 500, 16, 20, 0.25


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.lstm, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.LSTM(width, width),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, x, state=None):
        """Logits (length, columns, words) of what follows each word in `x` (length, columns); the state after it."""
        out, state = self.lstm(F.dropout(self.words(x), 0.1, self.training), state)
        return self.head(out), state


def text(words):
    """Columns of the text (length, columns) to train on, and to validate with; rare words are one."""
    found = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)))[:words]
    place = {word: number for number, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1), start=1)}
    numbers = torch.tensor([place.get(word, 0) for word in found])
    end = len(numbers) * 9 // 10
    return [one[: len(one) // COLUMNS * COLUMNS].view(COLUMNS, -1).t() for one in (numbers[:end], numbers[end:])]


def validation_loss(model, held_out):
    """Nats per word."""
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(held_out[:-1])[0].flatten(0, 1), held_out[1:].flatten()).item()
    model.train()
    return loss


def loop(attach, words, width, epochs, folder):
    torch.manual_seed(1111)
    columns, held_out = text(words)
    model = Model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    best, file = math.inf, Path(folder) / "words.pt"
    with attach(model, optimizer) as worker:
        columns = columns[:, worker.worker_id :: worker.num_workers]
        for epoch in range(epochs):
            state = None
            for start in range(0, len(columns) - 1, LENGTH):
                x, following = columns[start : start + LENGTH], columns[start + 1 : start + 1 + LENGTH]
                if state is not None:
                    state = tuple(one.detach() for one in state)
                model.zero_grad()
                logits, state = model(x[: len(following)], state)
                loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                worker.report(loss, samples=following.numel())
                optimizer.step()
            loss = worker.mean(validation_loss(model, held_out))
            if worker.worker_id == 0:
                print(f"epoch {epoch}: {loss:.2f} nats per word, perplexity {math.exp(loss):.0f}")
                if loss < best:
                    torch.save(model.state_dict(), file)
            if loss >= best:
                optimizer.param_groups[0]["lr"] /= 4
            best = min(best, loss)
        if worker.worker_id == 0 and epochs:
            model.load_state_dict(torch.load(file))
    return validation_loss(model, held_out)
