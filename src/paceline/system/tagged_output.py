"""The output of workers' processes: whole lines tagged with the worker, and progress bars that do not disturb others."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

_BARS_EVERY_S = 5.0  # if the output is not a terminal
_CLEAR = "\x1b[K"


class TaggedOutput:
    """A text stream that writes each line at once and whole, after a tag such as `[2] `.

    A line with a carriage return, such as a progress bar, is shown when it is flushed: in place on a terminal, otherwise as a
    line, at most every five seconds; its last state always becomes a line. Output that bypasses this stream is not tagged. If
    the output is a pipe, other workers' lines may cut lines of more than 4 KB.
    """

    def __init__(self, stream: TextIO, tag: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._tag = tag
        self._now_s = now_s
        self._pending = ""
        self._bar_s = -_BARS_EVERY_S

    def write(self, text: str) -> int:
        """Writes complete lines; keeps the rest."""
        *lines, self._pending = (self._pending + text).split("\n")
        if lines:
            start = f"\r{_CLEAR}" if self.isatty() else ""  # another worker's bar may stand there
            self._write_now("".join(f"{start}{self._tag}{_shown(line)}\n" for line in lines))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Shows a progress bar; keeps an unfinished line."""
        if "\r" not in self._pending:
            return
        text = _shown(self._pending)
        if self.isatty():
            self._pending = f"\r{text}" if text else ""
            self._write_now(f"\r{self._tag}{text}{_CLEAR}" if text else f"\r{_CLEAR}")
        elif not text:
            self._pending = ""
        elif self._now_s() - self._bar_s >= _BARS_EVERY_S:
            self._bar_s = self._now_s()
            self._pending = f"\r{text}"
            self._write_now(f"{self._tag}{text}\n")

    def end(self) -> None:
        if self._pending.strip():
            self.write("\n")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _write_now(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # something of Python's own, such as a notebook's
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(getattr(self._stream, "encoding", None) or "utf-8", errors="replace")
        while data:
            data = data[os.write(descriptor, data) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _shown(line: str) -> str:
    """The part of a line with carriage returns that a terminal would show."""
    return line.rstrip("\r").rpartition("\r")[2].rstrip() if "\r" in line else line


@contextlib.contextmanager
def tagged_output(tag: str) -> Iterator[None]:
    """Tags this process's standard output and errors."""
    flush_output()
    before = sys.stdout, sys.stderr
    tagged = [TaggedOutput(stream, tag) if stream is not None else None for stream in before]
    sys.stdout, sys.stderr = tagged  # type: ignore[assignment]
    try:
        yield
    finally:
        for one in filter(None, tagged):
            one.end()
        sys.stdout, sys.stderr = before


def flush_output() -> None:
    """Flushes standard output and errors, unless they are closed or cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # Python has None for a stream that was closed
            stream.flush()


def open_closed_streams() -> None:
    """Opens the null device for standard streams that were closed when the program began (`>&-`).

    Otherwise the next pipe or socket gets the number of a closed stream. Child processes then inherit it, print into it, and
    keep it open.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115
