"""The second copy of a shard: mirrors its server and replaces it when it dies (`standby_log` explains why that is safe)."""

from __future__ import annotations

from dataclasses import replace

from paceline.algorithms.server.announced import Announced
from paceline.algorithms.server.answers import Answers
from paceline.algorithms.server.incoming import state_from_bytes
from paceline.algorithms.server.served import ShardRules
from paceline.algorithms.server.shard import RETURN_DEADLINE_S, Shard
from paceline.algorithms.server.standby_log import CopyLink, Log, state_from
from paceline.algorithms.server.update import DROPPED, DecidedUpdate, UpdateInfo
from paceline.optim.rows import Selection
from paceline.optim.settings import OptimizerSettings
from paceline.ports.ports import Message, ServerPorts

_MOST_MALFORMED = 10  # entries; more are no accident
_NONSENSE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def serve_shard(shard_id: int, rules: ShardRules, ports: ServerPorts) -> None:
    """The program of a shard's server, or of its second copy."""
    (SecondCopy if ports.copies and ports.is_copy else Shard)(shard_id, rules, ports).run()


class SecondCopy(Shard):
    """A shard that follows another's log in its own memory; after taking over, an ordinary shard.

    Costs: the parameters, the rule's state, and one message.
    """

    def run(self) -> None:
        """Follows the server; takes over if it dies, ends if it ends."""
        log, num_malformed = Log(self._ports, self._id), 0
        for first, *more in log:
            try:
                self._replay(first, more)
            except _NONSENSE:  # the entry may be half replayed: start over from the whole state
                num_malformed += 1
                if num_malformed > _MOST_MALFORMED:
                    raise
                self._shared.count("malformed")
                log.begin_anew()
        if log.ports is not None:
            self._take_over(log.ports)
            super().run()

    def _begin(self) -> None:
        pass  # `_take_over` has restored the state

    def _take_over(self, ports: ServerPorts) -> None:
        ports.shared.restore(self._x, self._shared.version)
        self._ports, self._shared, self._x = ports, ports.shared, ports.shared.x
        assert self._ports.mailbox is not None
        self._announced = Announced(self._x, self._shared.ranges[self._id], takes_rows=self._rules.takes_rows)
        self._mailbox, self._answers = self._ports.mailbox, Answers(ports, self._id, self._announced)
        if self._user is not None:
            self._user.load(self._user.state())  # restarts on the shared vector
        self._not_back, self._patience_s = set(self._present), RETURN_DEADLINE_S
        self._link = CopyLink(self._ports, self._id, self._state_and_reads)
        self._link.begin(0.0)
        self._choices.take_over(self._shared.version, self._mailbox)

    def _replay(self, first: Message, more: list[Message]) -> None:
        """Replays one entry of the server's log; `first.version` is usually a worker's id."""
        worker, x = first.version, first.x
        match first.kind:
            case "copy-state":
                state = state_from([first, *more])
                self._admission = self._rules.admission(self._id)
                self._load(state)
                self._applier.load_reads(state["reads"])
                self._shared.restore(state["x"], state["version"])
                self._admission.over(self._shared.version)
            case "copy-settings" if x is not None:
                self._settings[worker] = OptimizerSettings.from_tensor(x)
            case "copy-loaded" if x is not None and self._user is not None:
                self._user.begin_with(state_from_bytes(x, self._x))
            case "copy-join":
                self._join(worker, int(first.weight))
            case "copy-meet":
                self._meetings.hear(worker, Message("meet", int(first.weight)))
            case "copy-leave":
                self._leave(worker)
            case "copy-bye":
                self._said_goodbye.add(worker)
            case "copy-backups":
                self._counted["backups"] = worker
            case "copy-skip":
                self._skip()
            case "copy-read":
                self._applier.read(worker, self._shared.version)
            case "copy-drop" if x is not None:
                incarnation, sequence = x.tolist()
                self._known[worker] = DecidedUpdate(incarnation, sequence, DROPPED)
            case "copy-ones" if x is not None:
                step, version_read, num_samples, num_missing, *numbers = x.tolist()
                missing, ones = numbers[: 2 * num_missing], numbers[2 * num_missing :]
                workers, incarnations, sequences = ones[::3], ones[1::3], ones[2::3]
                vectors = {one.kind: one.x for one in more}
                self._choices.make(self._shared.version, workers)
                update = UpdateInfo(
                    worker_id=workers[0],
                    sequence=sequences[0],
                    step=step,
                    version_read=version_read,
                    version=self._shared.version,
                    num_samples=num_samples,
                    missing=tuple(zip(missing[::2], missing[1::2], strict=True)),
                    echo=vectors.get("copy-echo"),
                )
                if (rows := vectors.get("copy-rows")) is not None:
                    selection = Selection.from_bytes(rows, *self._shared.ranges[self._id])
                    update = replace(update, selection=selection)
                gradient = vectors["copy-mean"]
                assert gradient is not None
                version = self._make(update, gradient, len(workers))
                for one in zip(workers, incarnations, sequences, strict=True):
                    self._known[one[0]] = DecidedUpdate(one[1], one[2], version)
            case _:
                pass
