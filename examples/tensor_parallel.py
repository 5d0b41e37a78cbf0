"""A small GPT on characters whose matrices are cut over workers: a line (1-D), a square (2-D), or several squares (2.5-D).

    python examples/tensor_parallel.py [--steps N]
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --mesh 2x2 [--mode summa]
    torchrun --standalone --nproc-per-node 8 examples/tensor_parallel.py --mesh 2x2x2
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --mesh "line 4"
    python examples/tensor_parallel.py --layout "tensor(q=2)" --workers 4 [--algorithm "local-sgd(period=4)"]
    python examples/tensor_parallel.py --layout "tensor(line=2)" --workers 4 --algorithm "downpour(push=5, fetch=5)"
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --layout "tensor(line=2)"

The text is Python's own reference, from its standard library. Numbers that are drawn are the same on every mesh, so each of
these prints the loss of the first, up to rounding, but for the last three: with a layout the loop is one of Paceline's, and
twice as many workers as the mesh has are two replicas, each with batches of its own. `--checkpoint FILE` saves whole tensors
there, and goes on from there when it is started again, on any mesh.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from paceline import model_parallel as mp

LENGTH, WIDTH, HEADS, LAYERS, BATCH = (
    32,
    48,
    12,
    2,
    24,
)  # characters that the model sees; its size; sequences of all workers
VOCABULARY = 96  # ASCII's printable characters and a line's end, which 2, 3, 4, 6 and 8 divide


class GPT(nn.Module):
    """A decoder of characters, whose first and last layer share their weight."""

    def __init__(self, mesh: mp.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.character = mp.Embedding(VOCABULARY, WIDTH, mesh)
        self.place = mp.PositionEmbedding(LENGTH, WIDTH, mesh)
        self.dropout = mp.Dropout(0.1, mesh, axis="features")
        self.blocks = nn.Sequential(*(mp.Block(WIDTH, HEADS, mesh, dropout=0.1) for _ in range(LAYERS)))
        self.norm = mp.LayerNorm(WIDTH, mesh)

    def forward(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean loss over the whole batch, of which `x` and `following` (batch, length) are this worker's part."""
        x = self.blocks(self.dropout(self.character(x) + self.place(x.shape[1])))
        return mp.cross_entropy(self.character.logits(self.norm(x)), following, self.mesh)


def batches(steps: int, first: int):
    """The whole batches (BATCH, LENGTH) of all workers, and each character's next one."""
    text = "".join(topics[name] for name in sorted(topics))
    data = torch.tensor([0 if one == "\n" else min(max(ord(one) - 31, 1), VOCABULARY - 1) for one in text])
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH)
        yield data[places], data[places + 1]


def train(mesh: mp.Mesh, steps: int, checkpoint: Path | None) -> None:
    model = GPT(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mp.check_model(model, optimizer)
    first, rank = 0, mesh.axes["world"].index
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint)
        mp.load_full_state_dict(model, saved["model"])
        mp.load_full_optimizer_state(model, optimizer, saved["optimizer"])
        first = saved["step"]
    losses = []
    for x, following in batches(steps, first):
        optimizer.zero_grad()
        loss = model(mesh.local_batch(x), mesh.local_batch(following))
        loss.backward()
        mp.clip_grad_norm(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    whole, state = mp.full_state_dict(model), mp.full_optimizer_state(model, optimizer)
    if rank == 0:
        if checkpoint is not None:
            torch.save({"model": whole, "optimizer": state, "step": steps}, checkpoint)
        share = sum(one.numel() for one in model.parameters()) / sum(
            whole[name].numel() for name, _ in model.named_parameters()
        )
        last = losses[-10:]
        print(
            f"{mesh.shape}: loss {sum(last) / max(1, len(last)):.4f} after {steps} steps, {share:.1%} of the parameters here"
        )


def train_in_run(layout: str, algorithm: str, steps: int) -> None:
    """The same as one of Paceline's loops: the model is built whole, and cut inside the `with`."""
    torch.set_num_threads(1)
    mesh = mp.Mesh.alone()
    model = GPT(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole, losses = sum(one.numel() for one in model.parameters()), []
    with pl.attach(model, optimizer, algorithm, layout=layout) as worker:
        share = sum(one.numel() for one in model.parameters()) / whole
        shape, replicas = mesh.shape, mesh.replicas
        for x, following in worker.batches(list(batches(steps * replicas, 0))):
            optimizer.zero_grad()
            loss = model(mesh.local_batch(x), mesh.local_batch(following))
            loss.backward()
            worker.clip_grad_norm_(1.0)
            worker.report(loss)
            optimizer.step()
            losses.append(loss.item())
    if worker.worker_id == 0:
        last, times = losses[-10:], f", {replicas} times" if replicas > 1 else ""
        print(
            f"{shape}{times}: loss {sum(last) / max(1, len(last)):.4f} after {steps} steps, {share:.1%} of the parameters here"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="line 1", help="'line 4', '2x2' or '2x2x2'")
    parser.add_argument("--layout", help="instead of a mesh: 'tensor(line=4)' or 'tensor(q=2, depth=2, mode=summa)'")
    parser.add_argument("--workers", type=int, help="with a layout: how many to launch here")
    parser.add_argument("--algorithm", default="all-reduce", help="with a layout: how its replicas agree")
    parser.add_argument("--mode", default="allgather", help="with a mesh: of a grid's products, allgather or summa")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ and chosen.layout is None:  # of a launcher; with a layout `attach` does it
        dist.init_process_group("gloo")
    try:
        if chosen.layout is not None:
            function = partial(train_in_run, chosen.layout, chosen.algorithm, chosen.steps)
            if chosen.workers is not None:
                pl.launch(function, workers=chosen.workers)
            else:
                function()
            return
        train(mp.Mesh.open(chosen.mesh, mode=chosen.mode), chosen.steps, chosen.checkpoint)
    except pl.UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # all workers find the same
            print(error, file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
