"""Workers on real Gloo processes, as torchrun starts them."""

import re

import forked
from free_ports import free_port


def ends(program, words, workers, **variables):
    """Return code and errors of each worker.

    Args:
        program: path of what each runs.
        words: its arguments.
        workers: how many.
        variables: of the environment, beside torchrun's.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers)}
    place |= {"OMP_NUM_THREADS": "1", **variables}  # as torchrun sets it, too
    environments = [{"PACELINE_DEADLINE_S": "60", **place, "RANK": str(rank)} for rank in range(workers)]
    with forked.running([program, *map(str, words)], environments) as running:
        said = [one.communicate(forked.AGAINST_HANGS_S)[1] for one in running]
        return [one.returncode for one in running], said


def says_missing(errors, worker):
    """Whether a worker is said not to have come, maybe beside others that stood still while answers were waited for."""
    return re.search(rf"workers? (\d(, \d)* and )?{worker} did not", errors) is not None
