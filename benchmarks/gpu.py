"""Paceline on GPUs, in one command that downloads nothing: the tests that need a GPU, and speeds next to PyTorch's own.

    python benchmarks/gpu.py [--only NAME,...] [--rehearse]

Each measurement runs in a process of its own, so if one fails, the others still give their rows. Sides alternate within a
process; warm-up is excluded; figures are medians. Writes benchmarks/results/gpu.md, and exits with 1 if rows are missing.
With --rehearse, everything runs on the CPU with small sizes, in one process: that checks this program and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from plain_loop import make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from all_reduce import make_resnet_20
from paceline.compression.codec import key_of
from paceline.compression.registry import codec_registry
from paceline.system.machine import machine, versions
from paceline.transport.device import device_copies

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.md"
TESTS = [HERE.parent / "tests" / one for one in ("transport/test_device.py", "worker/test_attached_on_device.py")]
CODECS = ("fp16", "qsgd(bits=4)", "sign", "top-k(fraction=0.01)")
HEADS = ("measured", "ours", "peer", "ratio, ours to the peer's")


class Row(NamedTuple):
    """One line of the table."""

    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None


class Size(NamedTuple):
    """How much is measured."""

    device: str
    rounds: int
    steps: int
    batch_size: int
    elements: int
    samples: int


FULL = Size("cuda", rounds=21, steps=50, batch_size=256, elements=1 << 24, samples=60_000)
SMALL = Size("cpu", rounds=2, steps=2, batch_size=8, elements=1 << 12, samples=64)


def tests(size: Size) -> Iterable[Row]:
    """The tests that a machine without a GPU skips."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-k", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
        subprocess.run([sys.executable, "-m", "pytest", *words], stdout=sys.stderr, check=False, cwd=HERE.parent)
        (found,) = ElementTree.parse(report).iter("testsuite")
    total, skipped, *wrong = (int(found.attrib[one]) for one in ("tests", "skipped", "failures", "errors"))
    if sum(wrong) or not total or (skipped and size.device == "cuda"):
        raise RuntimeError(f"of {total} tests, {sum(wrong)} failed and {skipped} were skipped")
    yield Row("tests that need a GPU", f"{total - skipped} passed, {skipped} skipped")


def all_reduce(size: Size) -> Iterable[Row]:
    """`all-reduce` and DistributedDataParallel: one GPU, and all."""
    is_full = size.device == "cuda"
    for gpus in sorted({1, torch.cuda.device_count()}) if is_full else [0]:
        words = ["--json", f"--rounds={size.rounds}", f"--steps={size.steps}", f"--gpus={gpus}"]
        words += [] if is_full else ["--only=mlp"]
        printed = subprocess.check_output([sys.executable, HERE / "all_reduce.py", *words], text=True)
        for case, one in json.loads(printed.splitlines()[-1]).items():
            sides = (f"{one[side]:.3f} ms per step" for side in ("ours_ms", "theirs_ms"))
            yield Row(f"`all-reduce`, {gpus or 2} workers, DDP: {case}", *sides, one["ratio"])


def attach(size: Size) -> Iterable[Row]:
    """A lone worker under a launcher, and a plain loop: of a small model, whose steps are the shortest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    warnings.filterwarnings("ignore", "The loop steps a SGD that attach was not given", UserWarning)
    batches = some_batches(size, (784,))
    (model, optimizer), (plain, plain_optimizer) = (trained(make_model, size) for _ in range(2))
    with pl.attach(model, optimizer, algorithm="all-reduce") as worker:
        own, others = iter(worker.batches(batches * size.steps * (size.rounds + 1))), cycle(batches)
        sides = (
            lambda: steps(model, optimizer, islice(own, size.steps)),
            lambda: steps(plain, plain_optimizer, islice(others, size.steps)),
        )
        yield compared("a lone worker under `all-reduce`, a plain loop: mnist-mlp", size, sides)


def servers(size: Size) -> Iterable[Row]:
    """Two workers with a parameter server, and one plain loop."""
    loop = ServedLoop(size)
    run = pl.launch(loop, workers=2, algorithm="parameter-server(mode=async)")
    ours = run.result["samples_per_s"]
    model, optimizer = trained(make_model, size)
    batches = some_batches(size, (784,))
    steps(model, optimizer, batches)
    wait(size)
    begun_s = time.perf_counter()
    steps(model, optimizer, islice(cycle(batches), size.samples // size.batch_size))
    wait(size)
    plain = size.samples / (time.perf_counter() - begun_s)
    what = "`parameter-server(mode=async)`, 2 workers, one plain loop: mnist-mlp"
    yield Row(what, f"{ours:,.0f} samples/s", f"{plain:,.0f} samples/s", ours / plain)


class ServedLoop:
    """The function of `servers`' workers."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def __call__(self) -> None:
        """Trains on this many samples in all."""
        model, optimizer = trained(make_model, self.size)
        batches = some_batches(self.size, (784,))
        with pl.attach(model, optimizer) as worker:
            steps(
                model, optimizer, worker.batches(batches * (self.size.samples // self.size.batch_size // len(batches)))
            )


def copies(size: Size) -> Iterable[Row]:
    """What leaves a GPU as a message: copies through pinned memory, and codecs after them."""
    device = torch.device(size.device, 0) if size.device == "cuda" else torch.device("cpu")
    through, x = device_copies(device), torch.randn(size.elements, device=device)
    host = through.pinned(len(x), x.dtype) if through is not None else torch.empty_like(x)

    def fetch() -> None:
        if through is None:
            host.copy_(x)
        else:
            through.fetch(x, host).wait()

    gb = x.nbytes / 1e9
    yield compared("a gradient to pinned memory, `x.cpu()`", size, (fetch, lambda: x.cpu()), gb)
    for spec in CODECS:
        codec = codec_registry.build(spec)
        memory = codec.start(len(host), host.dtype)

        def code(codec=codec, memory=memory) -> None:
            fetch()
            codec.encode(host, memory, key_of(1, 1))

        yield compared(f"the same, coded by `{spec}`, uncoded", size, (code, fetch), gb)


def batches(size: Size) -> Iterable[Row]:
    """Batches moved by `device=`, and by the loop."""
    count = size.batch_size * size.steps
    data = TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))
    loader = DataLoader(data, batch_size=size.batch_size, pin_memory=size.device == "cuda")
    (model, optimizer), (plain, plain_optimizer) = (trained(make_resnet_20, size) for _ in range(2))
    with pl.attach(model, optimizer) as worker:
        moved = worker.batches(loader, device=size.device)
        sides = (
            lambda: steps(model, optimizer, moved),
            lambda: steps(plain, plain_optimizer, ((x.to(size.device), y.to(size.device)) for x, y in loader)),
        )
        yield compared("`worker.batches(loader, device=...)`, `x.to(device)`: ResNet-20", size, sides)


# `attach` is the last, as its process counts as launched from then on.
MEASUREMENTS: dict[str, Callable[[Size], Iterable[Row]]] = {
    "tests": tests,
    "all-reduce": all_reduce,
    "servers": servers,
    "copies": copies,
    "batches": batches,
    "attach": attach,
}


def trained(make: Callable[[], nn.Module], size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on the device, and its optimizer."""
    torch.manual_seed(0)
    model = make().to(size.device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def some_batches(size: Size, shape: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight batches on the device."""
    generator = torch.Generator().manual_seed(0)
    pairs = (
        (torch.randn(size.batch_size, *shape, generator=generator), torch.randint(0, 10, (size.batch_size,)))
        for _ in range(8)
    )
    return [(x.to(size.device), y.to(size.device)) for x, y in pairs]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, source: Iterable) -> None:
    """Trains on these batches."""
    for x, y in source:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def wait(size: Size) -> None:
    """Waits until the GPU has completed its work."""
    if size.device == "cuda":
        torch.cuda.synchronize()


def compared(what: str, size: Size, sides: tuple[Callable, Callable], gb: float | None = None) -> Row:
    """Times both sides in turn; the ratio is of times, or, with the gigabytes of a side's turn, of speeds."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(size.rounds + 1):
        for place in (0, 1) if number % 2 else (1, 0):
            begun_s = time.perf_counter()
            sides[place]()
            wait(size)
            if number:
                times[place].append(time.perf_counter() - begun_s)
    ours_s, peers_s = map(statistics.median, times)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    if gb is not None:
        return Row(what, f"{gb / ours_s:.2f} GB/s", f"{gb / peers_s:.2f} GB/s", 1 / ratio)
    return Row(what, *(f"{1e3 * one / size.steps:.3f} ms per step" for one in (ours_s, peers_s)), ratio)


def measured(name: str) -> Iterator[Row]:
    """A measurement's rows, from a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, f"--measure={name}"], stdout=subprocess.PIPE, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("["):
            yield Row(*json.loads(line))
    if done.returncode or "[" not in done.stdout:
        yield Row(f"**{name}: failed**", f"exit code {done.returncode}")


def page(rows: list[Row]) -> str:
    """The results as Markdown."""
    about, package = machine(), versions()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    table = [HEADS, ("---",) * len(HEADS)]
    table += [(row.what, row.ours, row.peer, f"{row.ratio:.3f}" if row.ratio is not None else "") for row in rows]
    return "\n".join(
        [
            "# GPUs",
            "",
            f"{', '.join(gpus) or 'No GPU'}; {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB. Python"
            f" {package['python']}, PyTorch {torch.__version__}. {date.today()}. Command: `python benchmarks/gpu.py`.",
            "",
            "In each row the peer is named last. Ratios of times are better below 1, ratios of GB/s and samples/s above 1.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
            "",
        ]
    )


def main() -> int:
    """Runs the measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help=f"of {', '.join(MEASUREMENTS)}; separated by commas. Writes no page.")
    parser.add_argument("--rehearse", action="store_true", help="everything on the CPU, small; writes no page")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        for row in MEASUREMENTS[given.measure](FULL):
            print(json.dumps(row), flush=True)
        return 0
    if not (given.rehearse or torch.cuda.is_available()):
        parser.error("PyTorch finds no GPU here; --rehearse checks this program on the CPU.")
    names = given.only.split(",") if given.only else list(MEASUREMENTS)
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        parser.error(f"there is no measurement '{unknown[0]}'; known: {', '.join(MEASUREMENTS)}.")
    rows = []
    for name in names:
        for row in MEASUREMENTS[name](SMALL) if given.rehearse else measured(name):
            print(*(str(cell) for cell in row if cell not in ("", None)), sep=" | ", flush=True)
            rows.append(row)
    text = page(rows)
    if given.rehearse or given.only:
        print(text)
    else:
        RESULTS.write_text(text, encoding="utf-8")
    return int(any("failed" in row.what for row in rows))


if __name__ == "__main__":
    sys.exit(main())
