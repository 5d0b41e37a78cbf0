"""The mailbox against a bare pyzmq ping-pong between two processes of one machine: round trips in turn, in one run.

    python benchmarks/mailbox.py [--pairs 15] [--against bare | tcp] [--out FILE]

Prints a table and writes benchmarks/results/mailbox.md. Every pair is one burst of round trips of ours and one of the peer's;
who goes first alternates. The bare peer is the shortest program there is: a ROUTER and a DEALER on loopback, no header, and
what it receives are bytes. "copied" uses pyzmq's defaults: one copy at `send` (as ours, which lets the vector be written again
at once) and one at `recv`. "uncopied" does without both, so that nobody may write to the array while it is under way; it is
printed for comparison. "copied, polls three" is a control: before each message the bare peer polls its socket, that socket's
monitor and an eventfd, as a mailbox must that notices a lost connection and another thread's wish at once.

Against `tcp` the peer is the same mailbox, unencrypted, over TCP on loopback in place of Unix sockets, as it was once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import textwrap
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zmq

from paceline.ports.matching import PendingEvents
from paceline.ports.ports import Message, Received
from paceline.system.machine import machine, versions
from paceline.transport.inbox import Inbox
from paceline.transport.mailbox import ZmqMailbox
from paceline.transport.wire import Sort, pack, unpack

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 60.0
SIZES = {"100 bytes": (100, 300, "1.5"), "4 MB": (4_000_000, 20, "1.1"), "40 MB": (40_000_000, 3, "")}


class Loopback:
    """A port, for comparison: in place of `LocalSocket`."""

    def __init__(self, listener: zmq.Socket) -> None:
        listener.bind("tcp://127.0.0.1:*")
        self.endpoint = listener.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Nothing is left of a port."""


def mailbox_over(kind: str, *words: Any) -> ZmqMailbox:
    """A mailbox over Unix sockets or TCP."""
    if kind == "unix":
        return ZmqMailbox(*words)
    with (
        mock.patch("paceline.transport.inbox.LocalSocket", Loopback),
        mock.patch.object(ZmqMailbox, "_may_dial", return_value=True),
    ):
        made = ZmqMailbox(*words)
        made.connect(DEADLINE_S)
        return made


# The echoes, each in a process of its own


def mailbox_echo(port: int, kind: str) -> None:
    """Sends every message back."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port)
    with mailbox_over(kind, store, 1, 2) as mailbox:
        mailbox.connect(DEADLINE_S)
        while isinstance(received := mailbox.receive(), Received):
            mailbox.send(0, received.message)


def three_polled(socket: zmq.Socket) -> Callable[[], Any]:
    """Waits for `socket` in a poll of three."""
    poller = zmq.Poller()
    for one in (socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), os.eventfd(0, os.EFD_NONBLOCK)):
        poller.register(one, zmq.POLLIN)
    return lambda: dict(poller.poll())


def bare_echo(pipe: Any, polls: bool) -> None:
    """Sends every message back, with or without pyzmq's copies, as its first frame says; ends on an empty message."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    wait = three_polled(router) if polls else None
    while True:
        if wait is not None:
            wait()
        name, how = router.recv(), router.recv()
        if how == b"end":
            break
        copy = how == b"copied"
        message = router.recv(copy=copy)
        router.send(name, zmq.SNDMORE)
        router.send(message, copy=copy)
    router.disable_monitor()
    router.close(linger=0)


# Their other ends


class Ours:
    """Round trips of the mailbox."""

    def __init__(self, kind: str = "unix") -> None:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=mailbox_echo, args=(store.port, kind), daemon=True)
        self._process.start()
        self._mailbox = mailbox_over(kind, store, 0, 2)
        self._mailbox.connect(DEADLINE_S)

    def round_trips_s(self, num_bytes: int, count: int) -> list[float]:
        """How long each took."""
        x, times_s = torch.ones(num_bytes // 4), []
        for number in range(count):
            begun_s = time.perf_counter()
            self._mailbox.send(1, Message("x", number, x=x))
            received = self._mailbox.receive(DEADLINE_S)
            times_s.append(time.perf_counter() - begun_s)
            assert isinstance(received, Received)
            assert received.message.number == number
        return times_s

    def close(self) -> None:
        """Ends the echo as well."""
        self._mailbox.close()
        self._process.join(DEADLINE_S)


class Bare:
    """Round trips of pyzmq alone; with `polls`, both ends poll three sockets before each message."""

    def __init__(self, polls: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=bare_echo, args=(theirs, polls), daemon=True)
        self._process.start()
        self._dealer = zmq.Context.instance().socket(zmq.DEALER)
        self._dealer.connect(f"tcp://127.0.0.1:{ours.recv()}")
        self._wait = three_polled(self._dealer) if polls else None

    def round_trips_s(self, num_bytes: int, count: int, copy: bool) -> list[float]:
        """How long each took."""
        x, times_s = np.ones(num_bytes // 4, np.float32), []
        for _ in range(count):
            begun_s = time.perf_counter()
            self._dealer.send(b"copied" if copy else b"uncopied", zmq.SNDMORE)
            self._dealer.send(x, copy=copy)
            if self._wait is not None:
                self._wait()
            received = self._dealer.recv(copy=copy)
            times_s.append(time.perf_counter() - begun_s)
            assert len(received) == num_bytes
        return times_s

    def close(self) -> None:
        """Ends the echo as well."""
        self._dealer.send(b"end")
        self._dealer.disable_monitor()
        self._dealer.close()
        self._process.join(DEADLINE_S)


def pair(first: Callable[[], list[float]], second: Callable[[], list[float]], swap: bool) -> tuple[float, float]:
    """Medians of one burst each; `swap` lets the second go first."""
    if swap:
        late = statistics.median(second())
        return statistics.median(first()), late
    return statistics.median(first()), statistics.median(second())


def row(size: str, how: str, pairs: list[tuple[float, float]], target: str) -> str:
    """One line of the table."""
    ratios = [ours / bare for ours, bare in pairs]
    low, high = np.percentile(ratios, [25, 75])
    ours_us, bare_us = (statistics.median(one[i] for one in pairs) * 1e6 for i in (0, 1))
    return (
        f"| {size} | {how} | {ours_us:,.0f} us | {bare_us:,.0f} us"
        f" | **{statistics.median(ratios):.2f}** ({low:.2f} to {high:.2f}, {len(pairs)} pairs) | {target} |"
    )


def parts() -> list[str]:
    """What a short message costs in Python on its way, at either end: pieces timed alone, their best of several times."""
    x = torch.ones(25)
    message = Message("x", 1, x=x)
    head, _ = pack(Sort.MESSAGE, message, 0, 0)
    received, arrivals = unpack(head, None).received, PendingEvents()
    context = zmq.Context()
    inbox = Inbox(context, None, None, 5.0)

    def match() -> None:
        arrivals.add(received)
        arrivals.take()

    pieces = {
        "writing the header": lambda: pack(Sort.MESSAGE, message, 0, 0),
        "reading and checking it": lambda: unpack(head, None),
        "matching": match,
        "a poll of the sockets": lambda: inbox.read(0.0),
    }
    took_us = {name: min(timeit.repeat(piece, number=2000, repeat=7)) / 2000 * 1e6 for name, piece in pieces.items()}
    inbox.close()
    context.term()
    said = ", ".join(f"{name} {us:.1f} us" for name, us in took_us.items())
    return textwrap.wrap(
        f"Of a round trip of 100 bytes {2 * sum(took_us.values()):.0f} us are Python that the bare peer does not run, half of"
        f" it at either end: {said}. The rest of the difference cannot be timed alone: the lock that makes the mailbox safe"
        " for several threads, and how it waits. A bare peer sleeps in `recv` of its only socket; a mailbox must notice a lost"
        " connection and another thread's wish at once, so it sleeps in a poll of three, and asks ZeroMQ again afterwards.",
        127,
    )


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs per ratio (default 15)")
    parser.add_argument("--against", choices=("bare", "tcp"), default="bare", help="the peer (default bare)")
    parser.add_argument("--out", type=Path, help="where the table is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    ours, rows = Ours(), []
    peers: dict[str, Any] = {}  # for each row of a size, how the peer makes a burst of round trips
    if arguments.against == "bare":
        bare, polling = Bare(), Bare(polls=True)
        peers["copied"] = lambda num_bytes, count: bare.round_trips_s(num_bytes, count, True)
        peers["copied, polls three"] = lambda num_bytes, count: polling.round_trips_s(num_bytes, count, True)
        peers["uncopied"] = lambda num_bytes, count: bare.round_trips_s(num_bytes, count, False)
        others: list[Any] = [bare, polling]
    else:
        others = [over_tcp := Ours("tcp")]
        peers["the mailbox over TCP"] = over_tcp.round_trips_s
    for size, (num_bytes, count, target) in SIZES.items():
        if (
            arguments.against == "tcp"
        ):  # the two are so alike that short bursts are fairer on a machine that does other things
            count = max(1, count // 6)
        for how, burst in peers.items():
            pairs = [
                pair(
                    lambda: ours.round_trips_s(num_bytes, count),
                    lambda: burst(num_bytes, count),
                    bool(index % 2),
                )
                for index in range(arguments.pairs + 1)
            ][1:]
            aim = "1.0" if arguments.against == "tcp" else target if how == "copied" else ""
            rows.append(row(size, how, pairs, aim))
            print(rows[-1], flush=True)
    for one in (ours, *others):
        one.close()
    if arguments.against == "tcp":
        out = arguments.out or RESULTS / "mailbox_tcp.md"
        title, names = "# The mailbox over Unix sockets against the same over TCP on loopback", ("peer", "Unix", "TCP")
    else:
        out = arguments.out or RESULTS / "mailbox.md"
        title, names = (
            "# Mailbox against a bare pyzmq ping-pong, two processes of one machine",
            ("bare pyzmq", "ours", "bare"),
        )
    about, package = machine(), versions()
    head = [
        title,
        "",
        f"Machine: {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}."
        f" Python {package['python']}, PyTorch {package['torch']}, pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}.",
        f"Command: `python benchmarks/mailbox.py --pairs {arguments.pairs} --against {arguments.against}`."
        f" Load average before: {load:.1f}.",
        "Round trips; medians over interleaved pairs of bursts, in brackets the middle half; less is better. What copied and"
        " uncopied mean: `benchmarks/mailbox.py`.",
        "",
        f"| message | {' | '.join(names)} | ratio | target |",
        "|---|---|---|---|---|---|",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*head, *rows, "", *(parts() if arguments.against == "bare" else []), ""]).rstrip() + "\n")


if __name__ == "__main__":
    main()
