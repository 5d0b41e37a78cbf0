"""All parts of a plan in threads of one process, connected through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from paceline.errors import WorkerLostError
from paceline.model_parallel.graph.exchange import Exchange
from paceline.model_parallel.graph.execute import PlacedPart
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.ports.ports import Event, Message, PeerLeft, Received

_DEADLINE_S = 600.0


class _Post:
    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.messages: dict[tuple[int, int, str, int], Message] = {}
        self.failed: int | None = None


class _Box:
    """One worker's mailbox, as far as `Exchange` needs it."""

    def __init__(self, post: _Post, worker: int) -> None:
        self._post, self._worker = post, worker

    def send(self, to: int, message: Message) -> None:
        with self._post.arrived:
            copied = message._replace(x=None if message.x is None else message.x.clone())
            self._post.messages[self._worker, to, message.kind, message.number] = copied
            self._post.arrived.notify_all()

    def receive(self, timeout_s: float, *, kind: str, sender: int, number: int) -> Event | None:
        post, key = self._post, (sender, self._worker, kind, number)
        with post.arrived:
            post.arrived.wait_for(lambda: key in post.messages or post.failed is not None, timeout_s)
            if (message := post.messages.pop(key, None)) is not None:
                return Received(sender, 0, message)
            return None if post.failed is None else PeerLeft(post.failed, 0, "failed")

    def fail(self) -> None:
        with self._post.arrived:
            self._post.failed = self._worker
            self._post.arrived.notify_all()


def run_parts(
    plan: PlanData,
    models: Sequence[nn.Module],
    work: Callable[[PlacedPart], Any],
    make: Callable[[PlanData, nn.Module, int], PlacedPart] = PlacedPart,
) -> list[Any]:
    """The results of `work` for each worker's part of its model; `models` can repeat one, as parts share no parameter."""
    parts = [make(plan, model, worker) for worker, model in enumerate(models)]
    post, found, errors = _Post(), [None] * len(parts), list[BaseException]()

    def run(part: PlacedPart) -> None:
        box: Any = _Box(post, part.worker)
        part.connect(Exchange(box, part.worker, wire=plan.wire, deadline_s=_DEADLINE_S))
        try:
            found[part.worker] = work(part)
        except BaseException as error:
            errors.append(error)
            box.fail()

    threads = [threading.Thread(target=run, args=(one,), name="paceline-part") for one in parts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise next((one for one in errors if not isinstance(one, WorkerLostError)), errors[0])
    return found
