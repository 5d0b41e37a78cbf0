"""The sequence lock in every order that a machine may make of its two sides' accesses; and its fences, as compiled.

The model is of machines that reorder: each side's accesses happen in any order that its fences, and the ordering of its atomic
accesses, leave open, and the two sides interleave in every way.
"""

import itertools
import math
import re

import llvmlite.binding as llvm
import numba
import pytest

from paceline.memory import ring, sequence

FENCE = "fence"
CELLS = ("a", "b")  # of the vector


def written(times, *, fenced=True, counted_by_version=False):
    """The writer's accesses: (cell, value) stores, fences, and a store with release ordering as ("release", cell, value)."""
    accesses = []
    for n in range(times):
        if counted_by_version:  # as it was: a mark, and a version that moves once all is over
            accesses += [("release", "writing", 1), *((cell, n + 1) for cell in CELLS), ("release", "writing", 0)]
        else:
            accesses += [("release", "word", 2 * n + 1), *([FENCE] if fenced else [])]
            accesses += [*((cell, n + 1) for cell in CELLS), ("release", "word", 2 * n + 2)]
    return accesses + ([("release", "version", times)] if counted_by_version else [])


def orders(accesses, is_bound):
    """Every order in which they may happen: `is_bound(earlier, later)` says which pairs stay as they are."""
    places = range(len(accesses))
    bound = {(i, j) for i, j in itertools.combinations(places, 2) if is_bound(accesses[i], accesses[j])}
    for order in itertools.permutations(places):
        at = {place: number for number, place in enumerate(order)}
        if all(at[i] < at[j] for i, j in bound):
            yield [accesses[place] for place in order]


def stores_bound(earlier, later):
    if FENCE in (earlier, later) or later[0] == "release":
        return True  # a store with release ordering comes after all before it
    return (earlier[1] if earlier[0] == "release" else earlier[0]) == later[0]  # stores to one cell keep their order


def loads_bound(earlier, later):
    if FENCE in (earlier, later):
        return True
    return earlier[0] == "acquire"  # a load with acquire ordering comes before all after it


def looks(*, fenced=True, counted_by_version=False):
    """The reader's: ("acquire", name, cell) and plain loads (name, cell)."""
    if counted_by_version:
        first = [("acquire", "version before", "version"), ("acquire", "writing before", "writing")]
        last = [("acquire", "writing after", "writing"), ("acquire", "version after", "version")]
    else:
        first, last = [("acquire", "before", "word")], [("acquire", "after", "word")]
    return [*first, *((cell, cell) for cell in CELLS), *([FENCE] if fenced else []), *last]


def counts(seen):
    if "before" in seen:
        return seen["before"] % 2 == 0 and seen["before"] == seen["after"]
    return not seen["writing before"] and not seen["writing after"] and seen["version before"] == seen["version after"]


def interleaved(one, other):
    """Whose turn it is, in every interleaving."""
    for turns in itertools.combinations(range(len(one) + len(other)), len(one)):
        left, right = iter(one), iter(other)
        yield [("store", next(left)) if n in turns else ("load", next(right)) for n in range(len(one) + len(other))]


def torn_copies(times, *, reorders, fenced=True, counted_by_version=False):
    """Copies that count, and hold values of two writes; and how many copies have been looked at."""
    writers = written(times, fenced=fenced, counted_by_version=counted_by_version)
    readers = looks(fenced=fenced, counted_by_version=counted_by_version)
    in_order = [writers], [readers]
    stores, loads = (orders(writers, stores_bound), list(orders(readers, loads_bound))) if reorders else in_order
    torn, tried = set(), 0
    for one, other in itertools.product(stores, loads):
        one, other = ([access for access in side if access != FENCE] for side in (one, other))
        for turns in interleaved(one, other):
            memory = dict.fromkeys(("word", "version", "writing", *CELLS), 0)
            seen = {}
            for what, access in turns:
                if what == "store":
                    memory[access[-2]] = access[-1]
                else:
                    seen[access[-2]] = memory[access[-1]]
            tried += 1
            if counts(seen) and len({seen[cell] for cell in CELLS}) > 1:
                torn.add(tuple(seen[cell] for cell in CELLS))
    return torn, tried


def test_a_copy_that_counts_is_whole_in_every_order():
    assert torn_copies(2, reorders=False) == (set(), math.comb(12, 4))
    both_orders_of_the_cells = 2
    assert torn_copies(1, reorders=True) == (set(), both_orders_of_the_cells**2 * math.comb(8, 4))


def test_a_version_that_is_counted_after_the_write_does_not_see_it():
    """As it was: the mark is gone and the version has not moved yet when the reader looks again."""
    assert torn_copies(1, reorders=False, counted_by_version=True)[0] == {(0, 1), (1, 0)}


def test_without_fences_machines_that_reorder_take_torn_copies():
    assert torn_copies(1, reorders=True, fenced=False)[0] == {(0, 1), (1, 0)}
    assert torn_copies(2, reorders=False, fenced=False)[0] == set(), "those that do not, need none"


def test_a_writer_that_dies_leaves_a_word_that_tells():
    """At every prefix: the word is odd exactly where part of the write may be there."""
    whole = written(1)
    for length in range(len(whole) + 1):
        memory = dict.fromkeys(("word", *CELLS), 0)
        for access in whole[:length]:
            if access != FENCE:
                memory[access[-2]] = access[-1]
        is_torn = memory["word"] % 2 == 1
        assert is_torn or memory["a"] == memory["b"]
        assert is_torn == (0 < length < len(whole))


# As compiled

BEGIN, END = sequence.begin, sequence.end
FIRST_LOOK, SECOND_LOOK = sequence.read_begin, sequence.read_end
KERNELS = {
    BEGIN: ["store atomic", "fence"],
    END: ["store atomic"],
    FIRST_LOOK: ["load atomic"],
    SECOND_LOOK: ["fence", "load atomic"],
    ring._announce: ["store atomic", "fence"],
    ring._count_after_copying: ["fence", "load atomic"],
}


def llvm_of(kernel):
    """Compiled anew: of code that comes from the cache there is none."""
    signature = kernel.nopython_signatures[0]
    return numba.njit(signature)(kernel.py_func).inspect_llvm(signature.args)


def steps_of(text, patterns):
    """The last lines of a function's body that match, as the names of their patterns."""
    return [name for line in text.splitlines() for name, pattern in patterns.items() if re.search(pattern, line)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_intermediate_code_has_what_the_protocol_needs(kernel):
    body = llvm_of(kernel).partition("\ndefine ")[2].partition("\n}")[0]
    patterns = {name: rf"\b{name}\b" for name in ("store atomic", "load atomic", "fence")}
    assert steps_of(body, patterns)[-len(KERNELS[kernel]) :] == KERNELS[kernel]
    assert all("seq_cst" in line for line in body.splitlines() if re.search(r"\batomic\b|\bfence\b", line))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_compiled_for_aarch64_it_has_barriers_there(kernel):
    """A load-acquire or store-release for each atomic access, and a full barrier for each fence, in this order."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=2)
    text = re.sub(r'^target (triple|datalayout) = ".*"$', "", llvm_of(kernel), flags=re.MULTILINE)
    text = re.sub(r'"target-(cpu|features)"="[^"]*"', "", text)
    module = llvm.parse_assembly(f'target triple = "{machine.triple}"\n{text}')
    assembly = machine.emit_assembly(module)
    first = assembly.partition("_ZN")[2].partition(".Lfunc_end0")[0]
    patterns = {"store atomic": r"\bstlr\b", "load atomic": r"\bldar\b", "fence": r"\bdmb\s+ish$"}
    assert steps_of(first, patterns)[-len(KERNELS[kernel]) :] == KERNELS[kernel]
