"""What codecs cost and save: speed next to a memory copy, bytes on the wire, and the link below which they pay.

    python benchmarks/codecs.py [--elements N] [--rounds N] [--write]

Speeds are of one thread, interleaved with copies of the same vector of float32 in the same run; medians of the rounds. Bytes
are what `CodedMean` sends for one vector, as the simulator's ring counts them, framing included, over those of a ring in
float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from paceline.compression.codec import Codec, key_of
from paceline.compression.registry import codec_registry
from paceline.system.machine import machine, versions

CODECS = (
    "fp16", "bf16", "bf16(feedback=true)", *(f"qsgd(bits={bits})" for bits in (2, 3, 4, 5, 6, 7, 8)), "dq(target_bits=4)",
    "ternary(clip=2.5)", "sign", "top-k(fraction=0.01)",
)  # fmt: skip
ON_SERVERS_ONLY = ("top-k(fraction=0.01)",)
WORKERS = 4
HEADS = 32 + 8  # bytes of a piece's frames, in the all-to-all and in the all-gather
BAR, BYTES_BAR = 0.2, 0.15


def seconds(codec: Codec, x: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """Of a copy, of encoding and of decoding: medians."""
    memory, target = codec.start(len(x), x.dtype), torch.empty_like(x)
    payload = codec.encode(x, memory, 0)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(rounds):
        at = [time.perf_counter()]
        target.copy_(x)
        at.append(time.perf_counter())
        payload = codec.encode(x, memory, key_of(1, number))
        at.append(time.perf_counter())
        codec.decode(payload, len(x), x.dtype)
        at.append(time.perf_counter())
        for own, begun, ended in zip(times, at, at[1:], strict=False):
            own.append(ended - begun)
    copy_s, encode_s, decode_s = map(statistics.median, times)
    return copy_s, encode_s, decode_s


def bytes_share(codec: Codec, num_elements: int) -> float:
    """Bytes that each worker sends, over a ring's in float32, which are 8 (n - 1) / n per element."""
    piece = -(-num_elements // (8 * WORKERS)) * 8
    payload = -(-codec.payload_bytes(piece, torch.float32) // 8) * 8
    return (2 * payload + HEADS) * (WORKERS - 1) / (8 * num_elements * (WORKERS - 1) / WORKERS)


def main() -> None:
    """Measures, and prints the page."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--elements", type=int, default=1 << 22)
    options.add_argument("--rounds", type=int, default=41)
    options.add_argument("--write", action="store_true", help="the page, to benchmarks/results/codecs.md")
    given = options.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(given.elements, generator=torch.Generator().manual_seed(0))
    about, package = machine(), versions()
    lines = [
        "# Codecs: what they cost, and when they pay", "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}."
        f" Python {package['python']}, PyTorch {package['torch']}, Numba {package['numba']}.",
        f"Command: `python benchmarks/codecs.py --elements {given.elements} --rounds {given.rounds} --write`.", "",
        f"One vector of {given.elements:,} float32, one thread. Speeds are shares of a memory copy's in the same run (bar of 4"
        f" bits: {BAR} each). Bytes are shares of a float32 ring's, {WORKERS} workers, scales and frames included (bar of 4"
        f" bits: {BYTES_BAR}). A codec pays on links slower than the last column, per worker, where nothing"
        f" hides the mean behind"
        " computing.", "",
        "| codec | encoding, of a copy's speed | decoding | encoding, GB/s | decoding, GB/s | bytes, of the ring's |"
        " pays below, Mbit/s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for spec in CODECS:
        codec = codec_registry.build(spec)
        copy_s, encode_s, decode_s = seconds(codec, x, given.rounds)
        speeds = [x.nbytes / one / 1e9 for one in (encode_s, decode_s)]
        row = [f"`{spec}`", f"{copy_s / encode_s:.2f}", f"{copy_s / decode_s:.2f}", *(f"{one:.2f}" for one in speeds)]
        if spec in ON_SERVERS_ONLY:
            row += ["pushes only", ""]
        else:
            share = bytes_share(codec, given.elements)
            saved = (1 - share) * 2 * x.nbytes * (WORKERS - 1) / WORKERS
            spent_s = encode_s * (1 + 1 / WORKERS) + 2 * decode_s
            row += [f"{share:.3f}", f"{8 * saved / spent_s / 1e6:,.0f}"]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "The inequality: with n workers and d elements a ring sends 8 d (n - 1) / n bytes per worker, and a"
        " codec the share c of"
        " it. It codes the vector and its piece of the mean, (1 + 1 / n) d elements, and decodes all it gets"
        " and the mean, 2 d. So"
        " it pays where",
        "",
        "    (1 - c) * 8 d (n - 1) / n / bandwidth  >  (1 + 1 / n) * encode_s + 2 * decode_s + lost overlap",
        "",
        "On one machine workers exchange through memory, where the left side is a copy: no codec pays there."
        " `power` has no row,"
        " as its cost depends on the matrices. With `sign` and `power` the mean begins when backward has ended.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        (Path(__file__).parent / "results" / "codecs.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
