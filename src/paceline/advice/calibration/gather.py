"""Messages within a group of workers: all send to worker 0, worker 0 answers all, and all learn of a lost worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from paceline.errors import PacelineError, PeerLostError, UsageError, WorkerLostError, name_workers
from paceline.ports.checks import MalformedMessageError
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Received

_FIRST_ERROR_S = 10.0
_ADVICE = "Nothing was written; start all workers again."


class WorkerGroup:
    """One worker's part in a group; every worker must make the same calls in the same order.

    A malformed message is discarded, because a valid one may follow. If none does, the error names the sender.

    Args:
        deadline_s: time that worker 0 waits for an answer, and the others for worker 0.
        what: the current activity, for error messages; may be changed between calls.

    Raises:
        WorkerLostError: in all calls: a worker left, or did not answer within the deadline.
        PacelineError: another worker failed, with its message.
    """

    def __init__(self, mailbox: Mailbox, worker_id: int, num_workers: int, deadline_s: float) -> None:
        self.mailbox, self.worker_id, self.num_workers = mailbox, worker_id, num_workers
        self.deadline_s, self.what = deadline_s, "starting"
        self._number = 0  # of calls; a fast worker may have made the next one already
        # Workers that left after their answer, and why: an error if another answer is needed.
        self._left: dict[int, str] = {}
        self._heard: PacelineError | None = None  # the error of another worker

    def gather(self, mine: Any, read: Callable[[int, Any], Any] = lambda _, words: words) -> list[Any]:
        """Returns all workers' values, plain data, in worker order, on worker 0; an empty list on the others.

        `read` converts each worker's value, including worker 0's own, and raises ValueError if it is invalid.
        """
        self._number += 1
        if self.worker_id != 0:
            self._say(0, f"answer {self._number}", mine)
            return []
        for worker, why in self._left.items():
            raise self.lost(worker, why)
        answers, until_s = {0: read(0, json.loads(json.dumps(mine)))}, time.monotonic() + self.deadline_s
        malformed: set[int] = set()
        while len(answers) < self.num_workers:
            arrival = self.mailbox.receive(
                max(0.0, until_s - time.monotonic()), kind=(f"answer {self._number}", "failed")
            )
            if arrival is None:
                missing = [worker for worker in range(self.num_workers) if worker not in answers]
                wrong = f", and {name_workers(sorted(malformed))} sent a malformed message" if malformed else ""
                raise WorkerLostError(
                    f"While {self.what}: {name_workers(missing)} did not answer within {self.deadline_s:g} s{wrong}. {_ADVICE}"
                )
            if isinstance(arrival, PeerLeft) and arrival.peer in answers:
                self._left[arrival.peer] = arrival.reason
                continue
            try:
                if (received := self._checked(arrival)) is not None:
                    answers[received.sender] = _read(received, read)
            except MalformedMessageError as error:
                malformed.add(error.sender)
        return [answers[worker] for worker in range(self.num_workers)]

    def tell(self, words: Any = None, read: Callable[[int, Any], Any] = lambda _, words: words) -> Any:
        """Sends worker 0's value, plain data, to all; `read` as for `gather`."""
        self._number += 1
        if self.worker_id == 0:
            for other in range(1, self.num_workers):
                self._say(other, f"word {self._number}", words)
            return words
        nothing = "nothing"
        while True:
            arrival = self.mailbox.receive(self.deadline_s, kind=(f"word {self._number}", "failed"), sender=0)
            if arrival is None:
                raise WorkerLostError(
                    f"While {self.what}: worker 0 sent {nothing} for {self.deadline_s:g} s. {_ADVICE}"
                )
            try:
                if (received := self._checked(arrival)) is not None:
                    return _read(received, read)
            except MalformedMessageError:
                nothing = "no valid message"

    def meet(self) -> None:
        self.gather(None)
        self.tell()

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raises an error of one worker in all; if a worker is lost, all raise worker 0's error."""
        try:
            yield
        except PacelineError as error:
            failure = {"sentence": str(error), "usage": isinstance(error, UsageError), "of": self.worker_id}
            if self.worker_id == 0:
                for other in range(1, self.num_workers):
                    self._try_to_say(other, failure)
            elif error is not self._heard:
                self._try_to_say(0, failure)
                if isinstance(error, WorkerLostError):
                    raise (self._error_of_worker_0() or error) from None
            raise

    def lost(self, worker: int, why: str) -> WorkerLostError:
        how = "it has ended" if why == "ended" else why
        return WorkerLostError(f"While {self.what}: worker {worker} left ({how}). {_ADVICE}")

    def _error_of_worker_0(self) -> PacelineError | None:
        """Worker 0's error: if several workers lost each other, worker 0 knows which one was lost first."""
        until_s = time.monotonic() + _FIRST_ERROR_S
        while True:
            left_s = max(0.0, until_s - time.monotonic()) if 0 in self.mailbox.peers() else 0.0
            arrival = self.mailbox.receive(left_s, kind="failed", sender=0)
            if arrival is None:
                return None
            with contextlib.suppress(MalformedMessageError):
                if isinstance(arrival, Received):  # not an event; worker 0 may have left after sending this
                    return _failure(arrival)

    def _checked(self, arrival: Received | PeerLeft | PeerBack) -> Received | None:
        if isinstance(arrival, PeerBack):
            return None
        if isinstance(arrival, PeerLeft):
            raise self.lost(arrival.peer, arrival.reason)
        if arrival.message.kind == "failed":
            self._heard = _failure(arrival)
            raise self._heard
        return arrival

    def _say(self, to: int, kind: str, words: Any) -> None:
        x = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        try:
            self.mailbox.send(to, Message(kind, x=x))
        except PeerLostError as error:
            raise self.lost(to, str(error).partition(": ")[2].rstrip(".")) from None

    def _try_to_say(self, to: int, failure: dict[str, Any]) -> None:
        with contextlib.suppress(WorkerLostError):
            self._say(to, "failed", failure)


def _read(received: Received, read: Callable[[int, Any], Any] = lambda _, words: words) -> Any:
    x = received.message.x
    try:
        words = json.loads(bytes(x.numpy()) if x is not None and x.dtype == torch.uint8 else b"")
        return read(received.sender, words)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(received.sender, received.message, f"that cannot be read ({error})") from None


def _failure(received: Received) -> PacelineError:
    """Another worker's error, ready for this worker to raise."""
    match _read(received):
        case {"sentence": str(sentence), "usage": bool(usage), "of": int(of)}:
            if usage and of != 0:
                sentence = f"Worker {of}: {sentence}"
            return UsageError(sentence) if usage else PacelineError(sentence)
    raise MalformedMessageError(received.sender, received.message, "that describes no error")


_MOST = 1e15  # larger than any time, speed or count


def read(kind: Any, words: Any) -> Any:
    """Converts JSON to `kind`: a dataclass, a named tuple, or a type of their fields.

    Raises:
        ValueError: the value does not have that type.
    """
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if kind is Any:
        return words
    if origin is UnionType:  # with None
        return None if words is None else read(arguments[0], words)
    if origin in (int, float):
        if type(words) not in (origin, int) or not abs(words) < _MOST:
            raise ValueError(f"{words!r} where a number is expected")
        return origin(words)
    if dataclasses.is_dataclass(origin):
        hints = get_type_hints(origin)
        if _of(dict, words).keys() != hints.keys():
            raise ValueError(f"{sorted(words)} of {origin}")
        return kind(**{name: read(hints[name], value) for name, value in words.items()})
    if origin is dict:
        key_of = _whole if arguments[0] is int else str
        return {key_of(key): read(arguments[1], value) for key, value in _of(dict, words).items()}
    if origin is list:
        return [read(arguments[0], one) for one in _of(list, words)]
    if issubclass(origin, tuple):
        hints = get_type_hints(origin)
        return origin(*(read(one, word) for one, word in zip(hints.values(), _of(list, words), strict=True)))
    return _of(origin, words)


def _whole(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 16):
        raise ValueError(f"{key!r} where a whole number is expected")
    return int(key)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} is expected")
    return value
