"""Messages that no worker sends, made from those that it does."""

import torch

COUNTED = ("push", "push-only", "join", "clock", "choice", "save", "copy-has")
WEIGHED = ("push", "push-only", "x", "ack")
NUMBERS = (-(2**63), -(2**53), 2**53, 2**62, 2**63 - 1)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def malformed(draw, message):
    """One that differs from `message` in one thing, which makes it nobody's; `draw` is a `random.Random`."""
    ways = [lambda: message._replace(kind=draw.choice(("nonsense", message.kind[::-1], "x" * 16, "turn", "end")))]
    if message.kind in COUNTED:
        ways.append(lambda: message._replace(number=draw.choice(NUMBERS)))
    if message.kind in WEIGHED:
        ways.append(lambda: message._replace(weight=draw.choice((float("nan"), float("inf"), -5.0, 0.5, 1e300))))
        ways.append(lambda: message._replace(version=draw.choice((-1, *NUMBERS))))
    if message.x is not None and message.kind != "answer":
        ways.append(lambda: message._replace(x=None))
    if message.x is not None:
        ways += [
            lambda: message._replace(x=_longer(draw, message.x)),
            lambda: message._replace(x=_other_type(draw, message.x)),
        ]
        if message.x.dtype == torch.uint8:
            ways += [lambda: message._replace(x=_garbage(draw, message.x))] * 3
    return draw.choice(ways)()


def _longer(draw, x):
    """Or shorter; and whoever took it would notice."""
    length = draw.choice([0, 1, x.numel() - 1, x.numel() + 1, 2 * x.numel() + 3])
    return torch.full((max(0, length if length != x.numel() else length + 2),), 77, dtype=x.dtype)


def _other_type(draw, x):
    return torch.full((x.numel(),), 77, dtype=draw.choice([one for one in TYPES if one != x.dtype]))


def _garbage(draw, x):
    """Bytes that are no optimizer's settings: cut short, or overwritten at the beginning, or something else altogether."""
    data = bytes(x.tolist())
    other = [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 9999,
        data[: draw.randrange(len(data))],
        b"\xff" + data[1:],
        data + b"]",
    ]
    other += [data.replace(b'"lr"', b'"rl"'), data.replace(b"SGD", b"Adam"), data.replace(b"[[", b"[")]
    made = draw.choice([one for one in other if one != data])
    return torch.frombuffer(bytearray(made), dtype=torch.uint8) if made else torch.empty(0, dtype=torch.uint8)
