"""A model in which nothing is the same on two workers, as in a script without a seed."""

import os
import signal
import warnings

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment


def buffers_of(draw):
    x = torch.randn(4, 4, generator=draw)
    return {
        "dense": x.clone(),
        "transposed": x.t(),
        "with_gaps": x[::2],
        "expanded": x[:1].expand(4, 4),
        "sparse": (x * (x > 0)).to_sparse(),
        "rows": (x * (x > 0)).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "empty": torch.zeros(0),
        "complex": x.to(torch.complex64),
        "bfloats": x.bfloat16(),
        "order": torch.randperm(1000, generator=draw),
        "flag": x[0, 0] > 0,
    }


class Net(nn.Module):
    """With frozen parameters, and buffers of all layouts."""

    def __init__(self, seed=None):
        super().__init__()
        draw = torch.Generator()
        draw.seed() if seed is None else draw.manual_seed(seed)
        self.features, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        for one in self.parameters():
            one.data = torch.randn(one.shape, generator=draw)
        self.features.requires_grad_(False)
        for name, buffer in buffers_of(draw).items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.head(torch.tanh(self.features(x)))


def values(model):
    """All that a model holds, to be compared."""
    found = {}
    for name, one in model.state_dict().items():
        dense = one.dequantize() if one.is_quantized else one.to_dense() if one.layout != torch.strided else one
        found[name] = dense.to(torch.complex128).flatten().tolist()
    return found


def loop(folder, victim=None):
    """Writes down what each worker's every incarnation has before `attach` and in it; one dies once."""
    warnings.simplefilter("ignore")
    model = Net()
    del model.rows  # which copy.deepcopy cannot copy for `evaluate`
    own, environment = values(model), current_environment()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    with pl.attach(model, optimizer, evaluate=lambda model: {"loss": model.features.weight.sum().item()}) as worker:
        begun = {name: value for name, value in values(model).items() if not name.startswith("head")}
        (folder / f"{worker.worker_id}-{environment.incarnation}").write_text(repr((own, begun)))
        if (worker.worker_id, environment.incarnation) == (victim, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        for x in worker.batches([torch.ones(2, 4)] * 20):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


def begun(folder):
    """By worker and incarnation: what it had, and what it began with."""
    return {path.name: eval(path.read_text()) for path in folder.iterdir() if path.name[1:2] == "-"}
