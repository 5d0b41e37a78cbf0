"""One worker of a mesh over Gloo: python gloo_worker.py STORE RANK WORKERS RESULT [KILLED MESH].

It does what test_gloo.py's runs ask; worker KILLED of the mesh ends itself after a step.
"""

import itertools
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import WorkerLostError
from paceline.model_parallel.tensor import layers, state
from paceline.model_parallel.tensor.mesh import Mesh

sys.path.insert(0, str(Path(__file__).parents[2]))
from model_parallel.tensor.model import OPTIMIZERS, built, steps, trained

RUNS = {
    2: [("line 2", "allgather")],
    3: [("line 3", "allgather"), ("1x1x3", "allgather")],
    4: [("line 4", "allgather"), ("2x2", "allgather"), ("2x2", "summa")],
    8: [("2x2x2", "allgather"), ("2x2x2", "summa")],
}


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made within it have had at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for one in tree_leaves(outputs):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.live = {one: size for one, size in self.live.items() if not one.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return outputs


def peak_bytes(mesh):
    """Of a wide layer's forward and backward pass."""
    layer = layers.Linear(96, 96, mesh)
    x = mesh.local_features(mesh.local_batch(torch.ones(24, 16, 96))).clone().requires_grad_()
    with LiveBytes() as live:
        layer(x).sum().backward()
    return live.peak


def step_and_die(killed, shape):
    """Who is killed says nothing more; the others' error is printed."""
    mesh = Mesh.open(shape)
    model = built(mesh)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    try:
        for step in range(1000):
            steps(model, optimizer, mesh, step, step + 1)
            if dist.get_rank() == killed:
                os.kill(os.getpid(), signal.SIGKILL)
    except WorkerLostError as error:
        print(error)


def reshard(folder):
    """Saved on a grid by PyTorch's distributed checkpoint, loaded on a line: the same whole tensors."""
    grid, line = (built(Mesh.open(shape, seed=seed), dropout=0.1) for seed, shape in enumerate(("2x2", "line 4")))
    expected = state.full_state_dict(grid)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # PyTorch 2.8 itself uses it there
    dcp.save(state.sharded_state_dict(grid), checkpoint_id=folder)
    assert not torch.equal(state.full_state_dict(line)["place.weight"], expected["place.weight"])
    dcp.load(state.sharded_state_dict(line), checkpoint_id=folder)
    for name, tensor in state.full_state_dict(line).items():
        assert torch.equal(tensor, expected[name]), name


def main(store, rank, workers, result, killed=None, shape=None):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(workers))
    if killed is not None:
        step_and_die(int(killed), shape)
        return
    found = {}
    # In turn: test_equal.py has each mesh with both.
    for (shape, mode), optimizer in zip(RUNS[int(workers)], itertools.cycle(OPTIMIZERS), strict=False):
        mesh = Mesh.open(shape, mode=mode, bucket_bytes=3000)  # several buckets, which leave within backward
        found[shape, mode, optimizer] = trained(mesh, optimizer, max_norm=1.0, dropout=0.1)
        found["peak bytes", shape, mode] = peak_bytes(mesh)
    if workers == "4":
        reshard(Path(store).with_name("checkpoint"))
    torch.save(found, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
