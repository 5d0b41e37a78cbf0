"""A pool of parameter vectors behind one head word: the ParameterVectors of Leashed-SGD, recycled instead of allocated.

Words, all sequentially consistent: the *head* holds `version << 16 | slot` of the newest version; each participant has
one *hazard* word that names (slot + 1) what it reads; each slot has an *owner* word, the token of its writer.

A worker may write a slot only if it is not the head, no participant reads it, and no other worker writes it. The order
in which that is established is the whole algorithm:

1. Take the owner word by compare-and-swap. Checking first and taking afterwards breaks with two workers: B finds slot s
   free; A takes s, publishes it and gives it back; B then takes s, the head, and writes over it.
2. Check that the head is another slot. From here on s cannot become the head: only its owner publishes it.
3. Check that no hazard names s. Checking this before the head breaks: no hazard names s, the head; C starts to read it;
   D publishes another one; now s is not the head either, and C reads while we write.

A reader sets its hazard and then reads the head again. If the head is still the same *word*, the hazard was set while s
was the head, so step 2 or step 3 of every later claim sees one of them. Because the version is part of the word, a slot
that went through a whole life in between does not pass for the one that was read, neither here nor in `publish`.

`tests/memory/test_slot_protocol.py` runs through all interleavings of the protocol and of its wrong variants.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.memory.atomics import compare_and_swap, kernel, load, pause, store
from paceline.memory.failpoints import fail_point
from paceline.memory.ownership import owner_token
from paceline.memory.segment import LINE_BYTES, PAGE_BYTES, Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.waiting import raise_if_stopped
from paceline.ports.shared import View

_SLOT_BITS = 16
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_ROUNDS = 64  # scans for a free slot before the worker yields its core
_UNWRITTEN = -1  # version of a slot that is claimed and not yet published


class SlotPlan(PartPlan):
    """Where a pool lies in its segment."""

    @property
    def num_slots(self) -> int:
        """Two for each worker, one for each evaluator, and one more."""
        return 2 * self.num_writers + 1 + self.num_evaluators

    @property
    def vector_bytes(self) -> int:
        """From one slot to the next: whole pages."""
        return -(-self.num_parameters * self.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


@kernel("int64(int64, int64)")
def _protect_newest(head: int, hazard: int) -> int:
    while True:
        newest = load(head)
        store(hazard, (newest & _SLOT_MASK) + 1)
        if load(head) == newest:
            return newest
        pause()


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)")
def _claim(
    head: int, hazards: int, num_participants: int, owners: int, num_slots: int, touched: int, token: int
) -> int:
    for _ in range(_ROUNDS):
        for slot in range(num_slots):
            owner = owners + slot * LINE_BYTES
            if load(owner) != 0 or not compare_and_swap(owner, 0, token):
                continue
            free = (load(head) & _SLOT_MASK) != slot
            if free:
                for participant in range(num_participants):
                    if load(hazards + participant * LINE_BYTES) == slot + 1:
                        free = False
                        break
            if free:
                while True:
                    before = load(touched)
                    if slot < before or compare_and_swap(touched, before, slot + 1):
                        return slot
            store(owner, 0)
        pause()
    return -1


@kernel("int64(int64, int64)")
def _give_back(owner: int, token: int) -> int:
    if load(owner) != token:
        return -1
    store(owner, 0)
    return 0


@kernel("int64(int64, int64, int64, int64, int64)")
def _publish(head: int, after: int, new: int, owner: int, token: int) -> int:
    if load(owner) != token:
        return -1
    return 1 if compare_and_swap(head, after, new) else 0


class SlotPool(SegmentPart[SlotPlan]):
    """Immutable versions, published by one compare-and-swap; implements `SlotParameters`.

    Readers and writers never wait for each other, every gradient is computed from one consistent version, and a kill at
    any instant tears nothing. Use when consistency matters and updates are dense; a publish can fail and be retried.
    Costs: `latest`, `leave`, `claim` and `publish` together under 3 us, plus one copy of the parameters per update.

    Memory: m workers use at most 2m slots at any instant, e evaluators at most e more, provided that each worker
    holds one claim at a time and leaves what it reads before it publishes. Proof: let r be the worker that published
    the head. It had left before, so its hazard, if it has one now, was set after that and names the head. The slots in
    use are therefore the head, at most m - 1 others that hazards name, and at most m claims. Together with m gradients
    that is the paper's 3m. `claim` takes the lowest free slot and 2m slots always suffice for it, so the higher ones
    never get physical memory. The pool has one more, 2m + 1 + e, for programs that publish while they read.

    Differences from the paper: a slot is found again instead of allocated and freed; a hazard word per worker replaces
    the count of readers in each vector, because a count cannot be repaired when a reader dies.

    Reference: Bäckström, Walulya, Papatriantafilou and Tsigas, "Consistent Lock-free Parallel Stochastic Gradient
        Descent for Fast and Stable Convergence", IPDPS 2021, arXiv:2102.09032.
    """

    plan_type = SlotPlan

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        plan = self._plan
        self._token = owner_token(self._participant, self._incarnation)
        self._num_slots = plan.num_slots
        self._head = self._word("head")
        self._touched = self._word("touched")
        self._hazards = self._word("hazards")
        self._hazard = self._word("hazards", self._participant)
        self._owners = self._word("owners")
        self._vectors = [
            self._segment.tensor(plan.at["vectors"] + slot * plan.vector_bytes, plan.num_parameters, plan.dtype)
            for slot in range(self._num_slots)
        ]
        self._unwritten = [View(slot, _UNWRITTEN, x) for slot, x in enumerate(self._vectors)]

    @staticmethod
    def areas(layout: Layout, plan: SlotPlan) -> dict[str, int]:
        return {
            "vectors": layout.reserve("slots.vectors", plan.num_slots * plan.vector_bytes, PAGE_BYTES),
            "head": layout.words("slots.head", 1),
            "touched": layout.words("slots.touched", 1),
            "hazards": layout.words("slots.hazards", plan.num_participants),
            "owners": layout.words("slots.owners", plan.num_slots),
        }

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Publishes a first vector (P,) as this version (a resumed run continues counting), before anyone starts."""
        self._vectors[0].copy_(x)
        store(self._head, version << _SLOT_BITS)
        store(self._touched, 1)

    @property
    def version(self) -> int:
        return load(self._head) >> _SLOT_BITS

    def latest(self) -> View:
        newest = _protect_newest(self._head, self._hazard)
        fail_point("slots.hazard_set")
        slot = newest & _SLOT_MASK
        return View(slot, newest >> _SLOT_BITS, self._vectors[slot])

    def leave(self) -> None:
        store(self._hazard, 0)

    def claim(self) -> View:
        """A slot for this worker to write, neither published nor being read; its version is -1.

        Raises:
            RunStopped: the run ended while all slots were in use (a dead worker's are, until `recover`).
        """
        while True:
            # All but the last slot always suffice (see the class); the last is for a worker that publishes while it reads.
            for num_slots in (self._num_slots - 1, self._num_slots):
                slot = _claim(
                    self._head,
                    self._hazards,
                    self._plan.num_participants,
                    self._owners,
                    num_slots,
                    self._touched,
                    self._token,
                )
                if slot >= 0:
                    fail_point("slots.claimed")
                    return self._unwritten[slot]
            raise_if_stopped(self._abort)
            os.sched_yield()

    def publish(self, new: View, after: View) -> bool:
        """As in `SlotParameters`; raises `RuntimeError` if the slot of `new` is not this worker's."""
        # Two calls, so that a kill between them can be tested: then the head carries a dead worker's claim.
        outcome = _publish(
            self._head,
            after.version << _SLOT_BITS | after.slot,
            (after.version + 1) << _SLOT_BITS | new.slot,
            self._owners + new.slot * LINE_BYTES,
            self._token,
        )
        if outcome > 0:
            fail_point("slots.published")
            store(self._owners + new.slot * LINE_BYTES, 0)
        elif outcome < 0:
            raise RuntimeError(f"slot {new.slot} is not this worker's to publish: claim() one for every version")
        return outcome > 0

    def discard(self, new: View) -> None:
        if _give_back(self._owners + new.slot * LINE_BYTES, self._token) < 0:
            raise RuntimeError(f"slot {new.slot} is not this worker's to give back")

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the newest version without stopping anyone; returns its version.

        Raises:
            RuntimeError: this participant is reading a version, which would lose its protection.
        """
        if load(self._hazard):
            raise RuntimeError("snapshot() needs this participant's hazard word: call leave() first")
        view = self.latest()
        out.copy_(view.x)
        self.leave()
        return view.version

    def replace(self, x: torch.Tensor) -> None:
        self.latest().x.copy_(x)
        self.leave()

    def touched_slots(self) -> int:
        """Number of slots ever written, the first one included: the pool's physical memory, in vectors."""
        return load(self._touched)

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Frees the hazard and the claims of a dead participant, before it restarts; returns False, as nothing is torn.

        A participant that died between publishing and giving its claim back left a claim on a published slot, perhaps
        the head. Freeing that claim is safe too: the slot is protected by being the head or by its readers' hazards.
        """
        # Hazard words carry no incarnation. That is sound because only one incarnation of a participant lives at a
        # time, and the next one starts after this.
        store(self._hazards + participant_id * LINE_BYTES, 0)
        token = owner_token(participant_id, incarnation)
        for slot in range(self._num_slots):
            compare_and_swap(self._owners + slot * LINE_BYTES, token, 0)
        return False
