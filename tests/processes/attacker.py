"""A stranger that sends bytes to whatever a run listens at: another user of the machine, or a machine beside it."""

import json
import os
import random
import socket
import traceback

import torch

from paceline.ports.ports import Message
from paceline.transport.connections import hello_vector
from paceline.transport.wire import Sort, pack
from processes.join_programs import enter_namespace

NOBODY = 65534
_TOGETHER = 25  # frames on one connection
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
_HELLO_COMMAND = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(8) + os.urandom(32) + bytes(80)


def real_frames():
    """What a worker would send, unencrypted, and the beginning of what it does send, as bytes on a connection."""
    x = torch.full((300,), 1e30)
    hello = hello_vector("0123456789abcdef", "ipc:///proc/1/fd/1")
    packed = [
        pack(sort, message, sender, incarnation)
        for sort, message in [
            (Sort.HELLO, Message("hello", 1, x=hello)),
            (Sort.WELCOME, Message("welcome", 1)),
            (Sort.MESSAGE, Message("request", 1, x=x)),
            (Sort.MESSAGE, Message("push", 1, 4.0, x)),
            (Sort.MESSAGE, Message("x", 1, 1.0, x, 1)),
            (Sort.BYE, Message("bye")),
        ]
        for sender in (0, 1, 2)
        for incarnation in (0, 99)
    ]
    stored = [json.dumps(one).encode() for one in (["add", "next batch", 10**12], ["set", "peer/1", "garbage"])]
    found = [_GREETING, _GREETING + _HELLO_COMMAND]
    for head in [*(head for head, _ in packed), *stored]:
        found.append(b"\x01\x00" + bytes([0xFF]) + (len(head) + 1).to_bytes(8, "big") + b"\x00" + head)  # ZMTP 1.0
        null = _GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        found.append(null + b"\x02" + len(head).to_bytes(8, "big") + head)  # ZMTP 3
    return found


def mutated(draw, data):
    """With some bytes changed, cut short, or twice."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        made[draw.randrange(len(made))] = draw.randrange(256)
    return bytes(draw.choice((made, made, made[: draw.randint(1, len(made))], made + made)))


def attack(targets, num_random, num_mutated, seed, namespace, told):
    """Sends so many frames, to one target after the other, as nobody; writes to `told` how many were taken by the kernel."""
    draw, real = random.Random(seed), real_frames()
    if namespace is not None:
        enter_namespace(namespace)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    counts = {"random": 0, "mutated": 0, "connections": 0, "refused": 0}
    left = {"random": num_random, "mutated": num_mutated}
    number = 0
    while any(left.values()):
        kind = draw.choices(list(left), list(left.values()))[0]
        together = min(_TOGETHER, left[kind])
        before = counts[kind]
        frames = []
        for _ in range(together):
            random_bytes = draw.randbytes(draw.randint(1, 400))
            frames.append(random_bytes if kind == "random" else mutated(draw, draw.choice(real)))
        target = targets[number % len(targets)]
        number += 1
        try:
            with socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET) as raw:
                raw.settimeout(5.0)
                raw.connect(target if isinstance(target, str) else tuple(target))
                counts["connections"] += 1
                for frame in frames:
                    raw.sendall(frame)
                    counts[kind] += 1
            left[kind] -= together
        except OSError:  # the kernel lets nobody in, nobody listens, or they have hung up
            counts["refused"] += 1
            assert counts["refused"] < 1_000_000, "the run is gone"
            # What was not taken is sent again, unless nobody has ever let this stranger in.
            left[kind] -= counts[kind] - before if counts["connections"] else together
    os.write(told, json.dumps(counts).encode())


def attack_in_a_fork(*arguments):
    """The same from a process that can never have been root; what it counted."""
    hear, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            attack(*arguments, told)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(told)
    with os.fdopen(hear) as words:
        said = words.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(said)
