"""Several workers' programs on collectives, as threads over shared memory or simulated, and what codecs are tried on."""

import threading
from random import Random
from types import SimpleNamespace

import torch

from forked import AGAINST_HANGS_S
from paceline.compression.bf16 import BFloat16
from paceline.compression.coded_mean import CodedMean
from paceline.compression.dq import DQ
from paceline.compression.fp16 import Float16
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.compression.ternary import Ternary
from paceline.compression.top_k import TopK
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import Layout, Segment
from paceline.ports.ports import Counts

UNBIASED = [
    *(QSGD(bits=bits) for bits in range(2, 9)), QSGD(bits=8, norm="l2", bucket=None), QSGD(bits=3, bucket=8),
    Ternary(), Ternary(bucket=None), DQ(), DQ(target_bits=3, bucket=64),
]  # fmt: skip
WITH_MEMORY = [Sign(), Sign(bucket=None), Sign(bucket=16), TopK(fraction=0.1), BFloat16(feedback=True)]
ROUNDED = [Float16(), BFloat16()]
ON_ALL_REDUCE = [*UNBIASED, Sign(), Sign(bucket=16), BFloat16(feedback=True), *ROUNDED, Ternary(clip=2.5)]


def gaussian(seed, size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def vectors(size):
    """Vectors (size,) of float32 on which a codec that is right about Gaussian ones may be wrong."""
    normal, place = gaussian(size, size), torch.arange(size)
    largest = torch.finfo(torch.float32).max
    return {
        "gaussian": normal,
        "shifted": 5 + 0.01 * normal,
        "constant": torch.full((size,), -3.7),
        "sparse": torch.where(place % 1000 == size // 2 % 1000, torch.tensor(2.3), torch.tensor(0.0)),
        "tiny": 1e-36 * normal,
        "subnormal": 1e-40 * normal,
        "huge": normal / normal.abs().max() * largest,
        "all huge": torch.where(normal > 0, largest, -largest),
        "mixed": torch.where(place % 64 == 5, 1.0, 3e-3) * torch.logspace(0, -3, size),
        "heavy tails": normal / gaussian(size + 1, size),
        "zeros": torch.zeros(size),
    }


def run_workers(num_workers, program, num_parameters, dtype=torch.float32):
    """`program(worker_id, ports)` in a thread per worker; what each returned. An error of one is raised here."""
    layout = Layout()
    plan = SharedMemoryCollectives.reserve(layout, num_parameters, num_workers, dtype=dtype)
    segment = Segment.create(layout.size_bytes)
    results, errors = [None] * num_workers, []

    def work(worker):
        collectives = SharedMemoryCollectives(segment, plan, worker, timeout_s=AGAINST_HANGS_S)
        try:
            results[worker] = program(worker, ports_of(worker, num_workers, collectives))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AGAINST_HANGS_S)
    if errors:
        raise errors[0]
    return results


def ports_of(worker, num_workers, collectives=None):
    clock = SimpleNamespace(now_s=lambda: 0.0)
    return SimpleNamespace(
        worker_id=worker, num_workers=num_workers, collectives=collectives, counts=Counts(), clock=clock,
        moved=lambda *_, **__: None, random=Random(f"7/{worker}"), storage=None, incarnation=0, codec_moves={},
    )  # fmt: skip


def means(codec, vectors, weights=None, *, steps=1, ranges=None, shapes=()):
    """What every worker has after `steps` means of its vector, one after the other, and its `CodedMean`."""
    weights = weights or [1.0] * len(vectors)

    def program(worker, ports):
        coded, found = CodedMean(codec, ports, ranges, shapes), []
        for step in range(steps):
            x = vectors[worker](step) if callable(vectors[worker]) else vectors[worker].clone()
            weight = weights[worker](step) if callable(weights[worker]) else weights[worker]
            totals = coded.start(0, x, weight, (worker, 1.0, 0.0, 0.0)).wait()
            found.append((x, totals))
        return found, coded

    first = vectors[0](0) if callable(vectors[0]) else vectors[0]
    return run_workers(len(vectors), program, len(first), first.dtype)
