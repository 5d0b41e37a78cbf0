"""Vectors of a device on their way through a mailbox: on a GPU where there is one, and on a stand-in as late as one."""

import threading

import pytest
import torch

from lazy_copies import LATER, LazyCopies, needs_gpu
from paceline.errors import UsageError
from paceline.ports.ports import Message, Received
from paceline.transport.device import CudaCopies, StagedMailbox, device_copies, moving_to
from transport.conftest import DEADLINE_S

KINDS = [pytest.param("lazy", id="stand-in"), pytest.param("cuda", marks=needs_gpu, id="GPU")]


@pytest.fixture(scope="module", autouse=True)
def cuda_has_begun():
    """The driver's own threads and descriptors come with its first use and last: before it is counted what a test leaves."""
    if torch.cuda.is_available():
        torch.zeros(1, pin_memory=True).to("cuda", non_blocking=True)
        torch.cuda.synchronize()


@pytest.fixture(params=KINDS)
def device(request):
    """(what copies, where the vectors are)."""
    if request.param == "cuda":
        return CudaCopies(torch.device("cuda", 0)), torch.device("cuda", 0)
    return LazyCopies(), torch.device("cpu")


def x_of(mailbox, **filters):
    arrival = mailbox.receive(DEADLINE_S, **filters)
    assert isinstance(arrival, Received), arrival
    return arrival.message.x


@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
def test_a_vector_may_be_written_again_once_sent_and_belongs_to_its_receiver(mailboxes, device, size):
    copies, where = device
    a, b = (StagedMailbox(mailbox, copies) for mailbox in mailboxes(2))
    x = torch.zeros(size, device=where)
    for number in range(8):
        x.fill_(number)
        a.send(1, Message("x", number, 0.25, x, version=3))
        a.send(0, Message("own", number, x=x))
        x.fill_(-1)
    for mailbox in (b, a):
        received = [x_of(mailbox, number=number) for number in range(8)]
        assert [y.device for y in received] == [x.device] * 8
        for number, y in enumerate(received):
            assert torch.equal(y, torch.full_like(x, number))
            y.add_(1)
    assert torch.equal(x, torch.full_like(x, -1))


def test_what_has_no_vector_passes_as_it_is(mailboxes, device):
    a, b = (StagedMailbox(mailbox, device[0]) for mailbox in mailboxes(2))
    a.send(1, Message("hi", 5, 0.5, version=2))
    assert b.receive(DEADLINE_S) == Received(0, 0, Message("hi", 5, 0.5, version=2))
    assert b.receive(0) is None
    assert a.peers() == {1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_types_keep_their_values(mailboxes, device, dtype):
    copies, where = device
    a, b = (StagedMailbox(mailbox, copies) for mailbox in mailboxes(2))
    x = torch.arange(100, dtype=dtype, device=where)
    a.send(1, Message("x", x=x))
    y = x_of(b)
    assert (y.dtype, y.device) == (x.dtype, x.device)
    assert torch.equal(x, y)


def test_few_buffers_are_made_and_none_is_written_while_it_is_read(mailboxes):
    copies = LazyCopies()
    a, b = (StagedMailbox(mailbox, copies) for mailbox in mailboxes(2))
    for number in range(100):
        a.send(1, Message("x", x=torch.full((500,), float(number))))
        assert torch.equal(x_of(b), torch.full((500,), float(number)))
    assert 1 + LATER <= copies.num_pinned <= 3 + LATER  # one to send with, and those whose copies are not done


def test_programs_send_and_receive_at_the_same_time(mailboxes, device):
    copies, where = device
    ends = [StagedMailbox(mailbox, copies) for mailbox in mailboxes(2)]
    wrong = []

    def run(me, program):
        kind = f"program {program}"
        for number in range(50):
            ends[me].send(1 - me, Message(kind, number, x=torch.full((2000,), 100.0 * program + number, device=where)))
            y = x_of(ends[me], kind=kind, sender=1 - me, number=number)
            if not bool((y == 100.0 * program + number).all()):
                wrong.append((me, program, number, y[:3].tolist()))

    threads = [threading.Thread(target=run, args=(me, program)) for me in (0, 1) for program in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_cpu_needs_no_copies_and_other_devices_are_refused():
    assert device_copies(torch.device("cpu")) is None
    with pytest.raises(UsageError, match=r"CPU or on CUDA GPUs, but this one is on meta: move it with model\.cpu\(\)"):
        device_copies(torch.device("meta"))


@needs_gpu
def test_a_gpu_has_copies_of_its_own():
    assert isinstance(device_copies(torch.device("cuda", 0)), CudaCopies)


class Sentence:
    """Has tensors, and moves them itself."""

    def __init__(self, device="cpu"):
        self.device = str(device)

    def to(self, device):
        return Sentence(device)


def test_batches_are_moved_with_all_that_is_in_them():
    move = moving_to(torch.device("meta"))
    batch = {"x": torch.ones(2), "more": [torch.ones(1, dtype=torch.int64), Sentence(), "name", 3]}
    moved = move(batch)
    assert moved["x"].is_meta
    tensor, sentence, *others = moved["more"]
    assert (tensor.device.type, tensor.dtype, sentence.device, others) == ("meta", torch.int64, "meta", ["name", 3])
    assert not batch["x"].is_meta


def test_without_a_gpu_batches_are_not_moved_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="cannot be moved to cuda:0, as PyTorch finds no GPU"):
        moving_to(torch.device("cuda", 0))


@needs_gpu
def test_batches_moved_to_a_gpu_beside_its_work_have_their_values():
    move, total = moving_to(torch.device("cuda")), torch.zeros((), device="cuda")
    busy = torch.randn(2000, 2000, device="cuda")
    for number in range(20):
        busy = busy @ busy * 1e-3
        x, (sentence,) = move((torch.full((500_000,), float(number)).pin_memory(), [Sentence()]))
        total += x.mean()
        assert sentence.device == "cuda"
    assert total.item() == sum(range(20))
