"""The other side of a mailbox: a process that answers until worker 0 ends."""

from torch.distributed import TCPStore

import forked
from paceline.ports.ports import PeerLeft, Received
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
