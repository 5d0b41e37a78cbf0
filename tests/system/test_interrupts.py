"""SIGTERM that waits for the end of a step, in processes of their own."""

import os
import signal

import pytest

import forked
from paceline.system import interrupts
from paceline.system.interrupts import DeferredTermination, Terminated


def get_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def begun(handler=signal.SIG_DFL):
    signal.signal(signal.SIGTERM, handler)
    sigterm = DeferredTermination()
    sigterm.begin()
    return sigterm


def test_the_process_ends_by_it_in_the_end():
    def do():
        sigterm = begun()
        assert not sigterm
        sigterm.raise_if_any()
        get_sigterm()
        get_sigterm()  # the launcher's and its agent's
        with pytest.raises(Terminated):
            sigterm.raise_if_any()
        os.write(told, b"1")
        sigterm.end()
        return 0

    heard, told = os.pipe()
    assert forked.call(do) == -signal.SIGTERM
    assert os.read(heard, 1) == b"1"
    os.close(heard)
    os.close(told)


def test_a_later_one_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(interrupts, "_SAME_S", 0.0)

    def do():
        begun()
        get_sigterm()
        get_sigterm()
        return 0

    assert forked.call(do) == -signal.SIGTERM


def test_without_a_signal_it_is_the_systems_again():
    def do():
        sigterm = begun()
        sigterm.end()
        return int(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)

    assert forked.call(do) == 0


def test_a_handler_of_the_programs_own_stays():
    def do():
        heard = []
        sigterm = begun(lambda *_: heard.append(1))
        get_sigterm()
        sigterm.end()
        get_sigterm()
        return int(bool(sigterm) or len(heard) != 2)

    assert forked.call(do) == 0


def test_processes_that_are_forked_meanwhile_end_at_once():
    def do():
        begun()

        def child():
            get_sigterm()
            return 0

        return int(forked.call(child) != -signal.SIGTERM)

    assert forked.call(do) == 0
