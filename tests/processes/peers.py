"""The other side of a mailbox: a process that answers until worker 0 ends."""

import os

from torch.distributed import TCPStore

import forked
from paceline.errors import PeerLostError
from paceline.ports.ports import Message, PeerLeft, Received
from paceline.transport.mailbox import ZmqMailbox

DEADLINE_S = forked.AGAINST_HANGS_S
SILENCE_S = 3.0  # where it is waited for; elsewhere a process that waits for a core has not left


def echo(port, worker_id, num_workers, incarnation, silence_s):
    store = TCPStore("127.0.0.1", port)
    with ZmqMailbox(store, worker_id, num_workers, incarnation=incarnation, peer_deadline_s=silence_s) as mailbox:
        mailbox.connect(DEADLINE_S)
        while True:
            match mailbox.receive(DEADLINE_S):
                case None | PeerLeft(peer=0, reason="ended"):
                    return
                case Received(sender=sender, message=message):
                    mailbox.send(sender, message)


def floods(port, silence_s):
    """Sends to worker 1 until it takes no more, and dies."""
    mailbox = ZmqMailbox(TCPStore("127.0.0.1", port), 0, 2, peer_deadline_s=silence_s, send_deadline_s=1.0)
    mailbox.connect(DEADLINE_S)
    number = 0
    try:
        while True:
            mailbox.send(1, Message("x", number))
            number += 1
    except PeerLostError:
        os._exit(0)


def reads_late(port, silence_s, connection):
    """Reads what has come only when told to, and tells how much that was."""
    with ZmqMailbox(TCPStore("127.0.0.1", port), 1, 2, peer_deadline_s=silence_s) as mailbox:
        mailbox.connect(DEADLINE_S)
        connection.recv()
        number = 0
        while isinstance(event := mailbox.receive(DEADLINE_S), Received):
            assert event.message.number == number
            number += 1
        assert isinstance(event, PeerLeft), event
    connection.send(number)
