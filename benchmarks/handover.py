"""How long two cores take to hand a vector to each other: what workers that share parameters cannot do without.

Two threads add to all elements of one vector in turn. The time of a turn, less that of a turn of one thread by itself, whose
core has the vector in its own cache, is what handing it over costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numba import njit
from second_core import Pair

from paceline.memory import atomics

load, pause, store = atomics.load, atomics.pause, atomics.store


@njit(nogil=True)
def take_turns(turn: int, first: int, step: int, vector: np.ndarray, count: int) -> None:
    """Adds to the vector in turns `first`, `first + step`, ... of those that the number at address `turn` counts."""
    for index in range(count):
        while load(turn) != first + index * step:
            pause()
        for at in range(len(vector)):
            vector[at] += 1.0
        store(turn, first + index * step + 1)


def handover_us(num_elements: int, turns: int = 200, trials: int = 10) -> float:
    """Microseconds that a turn takes longer if the other core had the last one: the least of some trials; float32."""
    vector, turn, pair = np.zeros(num_elements, np.float32), np.zeros(1, np.int64), Pair()
    address = turn.ctypes.data
    alone = partial(take_turns, address, 0, 1, vector, turns)
    alone()  # compiles

    def turn_s(measure: Callable[[], float]) -> float:
        found = []
        for _ in range(trials):
            turn[0] = 0
            found.append(measure() / turns)
        return min(found)

    def alone_s() -> float:
        begun_s = time.perf_counter()
        alone()
        return time.perf_counter() - begun_s

    first, second = (partial(take_turns, address, which, 2, vector, turns // 2) for which in (0, 1))
    return 1e6 * (turn_s(lambda: pair.seconds(first, second)) - turn_s(alone_s))


if __name__ == "__main__":
    for num_elements in (1_000, 10_000, 134_794):
        print(f"{num_elements:,} parameters: {handover_us(num_elements):.1f} us")
