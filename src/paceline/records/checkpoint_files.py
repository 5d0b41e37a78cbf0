"""The files of checkpoints: `checkpoint/<n>/`, its parts, and `complete.json` once all are there.

Every file is written under another name, synced to disk and renamed, so that a kill at any instant leaves the last complete
checkpoint unchanged. The writer of a part stores its SHA-256 beside it; `complete.json` has those of all parts and its own,
and a part whose digest differs is not read. Numbers n grow; a new complete checkpoint replaces the older ones.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.system import files, tensor_files

PARAMETERS = "parameters.pt"
_COMPLETE = "complete.json"
_ENDING = "ending"
_RUNNING = "running-"  # prefix of the file that stands for a run without a supervisor, until it ends
_DIGEST = ".sha256"  # suffix of the file with a part's digest; if it exists, the part is written
_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)


# Writing


def write_part(folder: Path, number: int | None, name: str, content: dict[str, Any]) -> None:
    """Writes one part, unless it exists: a replaced worker's state would be later than the checkpoint.

    With `number` None it is a part of the run's end, where the last state counts; `end` gives it a number.

    Raises:
        NotWrittenError: it cannot be written; other parts are unchanged.
    """
    inside = folder / (_ENDING if number is None else str(number))
    digest = inside / f"{name}{_DIGEST}"
    with files.writing(inside):
        inside.mkdir(parents=True, exist_ok=True)
        if number is None:
            digest.unlink(missing_ok=True)
        elif digest.exists() or is_complete(folder, number):
            return
    files.write_text(digest, tensor_files.save(inside / name, content), sync=False)  # `complete` copies it


def all_there(folder: Path, number: int, workers: list[int], num_servers: int = 0) -> bool:
    """Whether the parameters and these workers' and servers' parts of a checkpoint are written."""
    return all((folder / str(number) / f"{name}{_DIGEST}").exists() for name in _names(workers, num_servers))


def complete(
    folder: Path,
    number: int,
    workers: list[int],
    about: dict[str, Any],
    *,
    keep: Path | None = None,
    num_servers: int = 0,
) -> bool:
    """Marks a checkpoint as complete if every part is there, and removes older ones; returns whether it is complete.

    It needs the parts of these `workers`, and of `num_servers` servers. `about` is further data for a resumed run, as JSON.
    The older checkpoint `keep` stays.

    Raises:
        NotWrittenError: the mark cannot be written; the older checkpoints stay.
    """
    if not all_there(folder, number, workers, num_servers):
        return False
    inside = folder / str(number)
    with files.writing(inside):
        digests = {name: (inside / f"{name}{_DIGEST}").read_text() for name in _names(workers, num_servers)}
        content = {"number": number, "workers": workers, **about, "sha256": digests}
        content[files.CHECKSUM] = files.checksum_of(content)
        files.write_text(inside / _COMPLETE, json.dumps(content, indent=2))
        files.to_disk(inside)
        files.to_disk(folder)
    for name in digests:  # `complete.json` has the digests from now on
        with contextlib.suppress(OSError):
            (inside / f"{name}{_DIGEST}").unlink()
    for older in numbers(folder):
        if older < number and folder / str(older) != keep:
            remove(folder, older)
    return True


def end(folder: Path, number: int) -> None:
    """Gives the parts written at the end of the run a number."""
    with files.writing(folder):
        (folder / _ENDING).rename(folder / str(number))


def numbers(folder: Path) -> list[int]:
    """The numbers of all checkpoints in a folder, complete or not."""
    return sorted(int(path.name) for path in folder.glob("*") if _NUMBER.fullmatch(path.name))


def is_complete(folder: Path, number: int) -> bool:
    """Whether a checkpoint has been marked as complete."""
    return (folder / str(number) / _COMPLETE).exists()


def remove(folder: Path, number: int | None) -> None:
    """Removes a checkpoint, or the parts written at the end (None), as far as possible."""
    shutil.rmtree(folder / (_ENDING if number is None else str(number)), ignore_errors=True)


def clear(folder: Path, keep: Path | None) -> None:
    """Removes a killed run's unfinished files, and every checkpoint but the one from which this run starts.

    Otherwise a newer checkpoint that is nearly complete would be mistaken for this run's.
    """
    with files.writing(folder):
        for path in folder.glob(f"{_RUNNING}*"):  # first: a worker of that run writes nothing from now on
            path.unlink()
        for path in [*(folder / str(number) for number in numbers(folder)), folder / _ENDING]:
            if path != keep and path.exists():
                shutil.rmtree(path)


def begin(folder: Path, run: str, keep: Path | None) -> None:
    """Clears the folder for a run without a supervisor, named `run`."""
    clear(folder, keep)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_RUNNING}{run}").touch()


def claim_end(folder: Path, run: str) -> bool:
    """Whether the caller writes the run's last checkpoint: the first of its workers to ask, unless a newer run has begun."""
    try:
        (folder / f"{_RUNNING}{run}").unlink()
    except OSError:
        return False
    return True


# Reading


def newest(folder: Path) -> Path:
    """The newest complete checkpoint in a run's `checkpoint` folder, with every part verified.

    Costs: reading all of it.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    found = newest_or_none(folder)
    if found is None:
        raise UsageError(f"There is no complete checkpoint in {folder}; start a new run, without resuming.")
    check(found)
    return found


def newest_or_none(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, if it holds one."""
    found = [number for number in numbers(folder) if is_complete(folder, number)]
    return folder / str(max(found)) if found else None


def describe(checkpoint: Path) -> dict[str, Any]:
    """The `about` that `complete` wrote; refuses a damaged one."""
    path = checkpoint / _COMPLETE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop(files.CHECKSUM, None)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UsageError(f"{path} cannot be read: {why}; {_remedy(checkpoint)}.") from error
    if digest is None:
        raise UsageError(
            f"The checkpoint {checkpoint} has no checksums: an earlier version of Paceline wrote it, or it is damaged;"
            f" {_remedy(checkpoint)}."
        )
    if digest != files.checksum_of(content) or not _is_description(content, int(checkpoint.name)):
        raise UsageError(f"{path} is damaged; {_remedy(checkpoint)}.")
    return content


def _is_description(content: dict[str, Any], number: int) -> bool:
    workers, digests = content.get("workers"), content.get("sha256")
    if content.get("number") != number or not isinstance(workers, list) or not isinstance(digests, dict):
        return False
    if not workers or not all(type(one) is int and one >= 0 for one in workers):
        return False
    servers = sum(name.startswith("server-") for name in digests)
    return set(digests) == set(_names(workers, servers)) and all(isinstance(one, str) for one in digests.values())


def check(checkpoint: Path) -> None:
    """Refuses a complete checkpoint if a part is missing or damaged; names the first, and what to do."""
    for name in describe(checkpoint)["sha256"]:
        _check_part(checkpoint, name)


def parts(checkpoint: Path, prefix: str) -> list[str]:
    """The names of the parts that begin with `prefix`."""
    return [name for name in describe(checkpoint)["sha256"] if name.startswith(prefix)]


def load_part(checkpoint: Path, name: str) -> dict[str, Any] | None:
    """The content of a part; None if a complete checkpoint has no such part. Refuses a missing or damaged one."""
    if name not in describe(checkpoint)["sha256"]:
        return None
    _check_part(checkpoint, name)
    return tensor_files.load(checkpoint / name, "The checkpoint file")


def _check_part(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    try:
        stat = path.stat()
        digest = _digest_of(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise UsageError(
            f"The checkpoint file {path} cannot be read: {error.strerror}; {_remedy(checkpoint)}."
        ) from error
    if digest != describe(checkpoint)["sha256"][name]:
        raise UsageError(
            f"The checkpoint file {path} is damaged: its checksum does not match {_COMPLETE}; {_remedy(checkpoint)}."
        )


@lru_cache(maxsize=1024)
def _digest_of(path: Path, *identity: int) -> str:
    return files.digest_of(path)


def _remedy(checkpoint: Path) -> str:
    """The advice to resume from an older undamaged checkpoint, if there is one; else to start again."""
    folder = checkpoint.parent
    for number in reversed(numbers(folder)):
        older = folder / str(number)
        if number < int(checkpoint.name) and is_complete(folder, number):
            with contextlib.suppress(UsageError):
                check(older)
                return f"an older one, {older}, is whole: remove {checkpoint} to resume from there"
    return "start the run again without it"


def _names(workers: list[int], num_servers: int) -> list[str]:
    return [PARAMETERS, *(f"worker-{one}.pt" for one in workers), *(f"server-{one}.pt" for one in range(num_servers))]
