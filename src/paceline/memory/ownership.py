"""A word's owner: the token that names one incarnation of one participant."""

from __future__ import annotations

# A lock word carries this bit beside the token while a waiter sleeps until the word changes. It lies in the low half of
# the word, the half that a futex compares.
CONTENDED = 1 << 15

_MAX_PARTICIPANTS = CONTENDED - 1
_MAX_INCARNATIONS = 1 << 47


def owner_token(participant_id: int, incarnation: int) -> int:
    """The value that a participant leaves in the words that it owns: `incarnation << 16 | participant_id + 1`.

    Never 0, which means that the word has no owner. The incarnation distinguishes a restarted worker from its dead
    predecessor: the dead one's words can be freed without taking anything from the living one.

    >>> hex(owner_token(2, incarnation=1))
    '0x10003'

    Raises:
        ValueError: a number is negative or too large.
    """
    if not 0 <= participant_id < _MAX_PARTICIPANTS:
        raise ValueError(f"participant_id is {participant_id}; it must be at least 0 and below {_MAX_PARTICIPANTS}")
    if not 0 <= incarnation < _MAX_INCARNATIONS:
        raise ValueError(f"incarnation is {incarnation}; it must be at least 0 and below 2**47")
    return incarnation << 16 | (participant_id + 1)


def participant_of(token: int) -> int:
    """The participant that a token names."""
    return (token & (CONTENDED - 1)) - 1
