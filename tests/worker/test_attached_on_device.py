"""A launched lone worker whose model is on a device, a GPU or its stand-in on the CPU; and what is refused there."""

import pytest
import torch
from torch import nn

import paceline as pl
from lazy_copies import LazyCopies, needs_gpu
from paceline.loop.sharded import OwnedPieces, _like
from paceline.membership.environment import LaunchedEnvironment, SupervisedEnvironment, set_environment
from paceline.optim.flat import FlatBinding
from paceline.ports.private import PrivateVector
from paceline.ports.replica import Piece
from paceline.worker.memberships.supervised import SupervisedMembership
from processes.join_programs import free_address


def made(device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def data(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(20)
    ]
    return [(x.to(device), y.to(device)) for x, y in batches]


@pytest.fixture
def on_device(monkeypatch):
    copies = LazyCopies()
    monkeypatch.setattr("paceline.worker.memberships.memory.device_copies", lambda device: copies)
    return copies


@pytest.fixture
def launched(monkeypatch):
    """This process is the only worker of another launcher."""
    host, _, port = free_address().rpartition(":")
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    set_environment(LaunchedEnvironment(deadline_s=60.0))
    yield
    set_environment(None)


LONE = [
    *("lockstep", "all-reduce", "all-reduce(sharded=true)"),
    *("local-sgd(period=2, warmup_steps=3)", "d-psgd", "ad-psgd", "parameter-server", "downpour(apply=user)"),
]


def trained_as_plainly(algorithm, device):
    """Trains with and without `attach`, and compares."""
    model, optimizer = made(device)
    with pl.attach(model, optimizer, algorithm=algorithm) as worker:
        assert isinstance(worker._membership.ports.shared, PrivateVector)
        train(model, optimizer, worker.batches(data(device)))
    plain, plain_optimizer = made(device)
    train(plain, plain_optimizer, data(device))
    assert {one.device.type for one in model.parameters()} == {device}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("algorithm", LONE)
def test_a_lone_worker_on_a_device_equals_plain_training_bit_for_bit(on_device, launched, algorithm):
    trained_as_plainly(algorithm, "cpu")
    of_the_loop = ["averaging"] if algorithm == "ad-psgd" else []
    assert on_device.streams == of_the_loop  # on the stream of the one that trains


@needs_gpu
@pytest.mark.parametrize("algorithm", LONE)
def test_a_lone_worker_on_a_gpu_equals_plain_training_bit_for_bit(launched, algorithm):
    trained_as_plainly(algorithm, "cuda")


@pytest.mark.parametrize("algorithm", ["leashed", "locked(kind=mutex)"])
def test_methods_on_shared_memory_are_refused_on_a_device_without_shared_memory(on_device, launched, algorithm):
    model, optimizer = made()
    says = r"keeps the parameters in the CPU's memory: move the model there with model\.cpu\(\), or choose all-reduce"
    with pytest.raises(pl.UsageError, match=says), pl.attach(model, optimizer, algorithm=algorithm):
        pass


@pytest.mark.parametrize(
    ("algorithm", "workers", "says"),
    [
        ("all-reduce(sharded=true)", 2, r"^all-reduce.* needs the model on the CPU under paceline\.launch"),
        ("parameter-server", 1, "^parameter-server.* needs the model on the CPU for a lone worker"),
    ],
)
def test_what_launched_workers_are_refused_on_a_device(on_device, algorithm, workers, says):
    environment = SupervisedEnvironment(num_workers=workers)
    with pytest.raises(pl.UsageError, match=says):
        SupervisedMembership(environment, made()[0], pl.algorithms.registry.build(algorithm))


def test_a_layout_is_refused_on_a_device(on_device):
    algorithm, environment = pl.algorithms.registry.build("all-reduce"), SupervisedEnvironment(num_workers=2)
    with pytest.raises(pl.UsageError, match=r"^Layouts support only models on the CPU"):
        SupervisedMembership(environment, made()[0], algorithm, layout=object())


def test_a_device_that_is_neither_cpu_nor_gpu_is_refused(launched):
    model = nn.Linear(3, 2, device="meta")
    with (
        pytest.raises(pl.UsageError, match="CPU or on CUDA GPUs, but this one is on meta"),
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        pass


def test_parameters_on_two_devices_are_refused(launched):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    with (
        pytest.raises(
            pl.UsageError, match=r"one device, but the model has torch\.float32 on cpu, torch\.float32 on meta"
        ),
        pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        pass


def test_parameters_that_something_has_moved_are_said_to_be():
    """As flatten_parameters does on a GPU: what the optimizer then writes, the flat vector does not see."""
    binding = FlatBinding([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))])
    binding.device = torch.device("cuda", 0)  # where it is looked after
    x = torch.ones(binding.num_elements)
    binding.bind(x)
    binding.bind(x)
    binding.parameters[1].data = torch.ones(2)
    with pytest.raises(pl.UsageError, match="flatten_parameters"):
        binding.bind(x)


def test_state_of_owned_pieces_stays_on_its_device():
    """On `meta`, which has no values and refuses to meet the CPU's tensors."""
    model = nn.Linear(40, 3, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    binding = FlatBinding(model.parameters(), on_any_device=True)
    pieces = [Piece(binding.offsets[0], 64, 0), Piece(binding.offsets[1], 3, 64)]
    owned = OwnedPieces(binding, optimizer, pieces)
    shapes = [
        {name: (value.device.type, *value.shape) for name, value in one.items()} for one in optimizer.state.values()
    ]
    assert [one["exp_avg"] for one in shapes] == [("meta", 64), ("meta", 3)]
    assert binding.zeros().device.type == "meta"
    view = binding.views(binding.zeros())[0]
    kinds = owned._state_kinds()
    assert {value.device.type for value in kinds[0].values() if value.dim()} == {"meta"}
    assert _like(kinds[0]["exp_avg"], model.weight, view, 0.0).device.type == "meta"
    assert _like(kinds[0]["step"], model.weight, view, 2.0) == 2.0
