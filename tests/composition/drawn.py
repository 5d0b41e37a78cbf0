"""Combinations at random: what an algorithm can meet in one run."""

from random import Random

from composition.loop import OPTIMIZERS, Case

LOCKSTEP = ["lockstep", "all-reduce(sharded=true)", "d-psgd", "d-psgd(topology=one-peer-exponential)"]
SHARED = [
    "hogwild", "hogwild(reads=copy)", "hogwild(step_size=inverse)", "locked", "locked(kind=rwlock)",
    "locked(step_size=tail)", "leashed", "leashed(persistence=1)", "leashed(step_size=exponential)",
]  # fmt: skip
GOSSIP = ["ad-psgd", "ad-psgd(topology=complete)"]
CODED = [
    "all-reduce", "local-sgd(period=3)", "local-sgd(period=2,warmup_steps=2)", "da-sgd(period=4,delay=2)",
    "da-sgd(period=3,delay=1,merge=corrected)", "diloco(period=3)", "diloco(period=4,fragments=2,delay=1)",
    "parameter-server", "parameter-server(mode=sync(backups=1))", "parameter-server(mode=sync(rate=linear))",
    "parameter-server(mode=async)", "parameter-server(mode=async(rate=rescaled))",
    "parameter-server(mode=bounded(clock_bound=2))", "parameter-server(mode=rennala(gradients=3))",
    "parameter-server(mode=ringmaster(threshold=2))", "parameter-server(mode=ringleader)",
    "parameter-server(shards=2)", "parameter-server(mode=async,apply=adagrad)",
    "downpour(push=3,fetch=2)", "downpour(apply=user)",
]  # fmt: skip
ALGORITHMS = [*LOCKSTEP, *SHARED, *GOSSIP, *CODED, "adaptive-revision"]
CODECS = [
    "qsgd(bits=4)", "qsgd(bits=8,norm=l2)", "ternary", "dq", "sign", "top-k(fraction=0.2)", "bf16", "bf16(feedback=true)",
    "fp16", "power(rank=1,min_rate=1.1,warmup_steps=2)",
]  # fmt: skip


def with_codec(algorithm, codec):
    """The spec of an algorithm with a codec; None: without."""
    if codec is None:
        return algorithm
    return f"{algorithm[:-1]},codec={codec})" if algorithm.endswith(")") else f"{algorithm}(codec={codec})"


def case(number):
    """The combination of this number: most with a codec if one is possible, a fifth with a death, a quarter an infinity."""
    random = Random(number)
    algorithm = random.choice([*ALGORITHMS, *["all-reduce"] * 6])  # which meets the most codecs
    codec = random.choice(CODECS) if random.random() < (0.6 if algorithm in CODED else 0.1) else None
    workers, batch, passes = random.randint(2, 4), random.randint(1, 4), random.choice([1, 1, 2, 3])
    missing = random.randrange(workers * batch)  # in an epoch's last round; the rounds make whole steps
    scaler = random.random() < 0.5
    return Case(
        algorithm=with_codec(algorithm, codec),
        optimizer=random.choice(sorted(OPTIMIZERS)),
        workers=workers,
        samples=workers * batch * passes * random.randint(2, 3) - missing,
        batch=batch,
        epochs=random.randint(1, 5),
        passes=passes,
        marked=random.random() < 0.5,
        clip=random.choice([None, None, 0.5, 20.0]),
        scaler=scaler,
        overflow=(random.randrange(workers), random.randint(1, 3)) if scaler and random.random() < 0.5 else None,
        slow=(random.randrange(workers), random.choice([1.7, 3.3, 20.0])) if random.random() < 0.5 else None,
        kill=(random.randrange(workers), random.randint(1, 4)) if random.random() < 0.2 else None,
        rate=random.choice([0.01, 0.05]),
        seed=number,
    )
