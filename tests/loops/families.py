"""One algorithm of each family: how its workers meet decides what a loop may do."""

SHARED_LOCKSTEP = ["lockstep", "all-reduce", "all-reduce(sharded=true)"]
OWN_LOCKSTEP = ["local-sgd(period=3)", "d-psgd"]
ASYNCHRONOUS = ["hogwild", "hogwild(reads=copy)", "locked", "leashed", "ad-psgd"]
SERVED = [
    "parameter-server",
    "parameter-server(mode=async)",
    "parameter-server(mode=bounded(clock_bound=2))",
    "downpour(push=3, fetch=2)",
    "adaptive-revision",
]
ALL = [*SHARED_LOCKSTEP, *OWN_LOCKSTEP, *ASYNCHRONOUS, *SERVED]
#: One for each place where a worker's parameters may be, and each way to deal out batches: what else differs in a family
#: is how its workers meet.
KINDS = ["all-reduce", "local-sgd(period=3)", "hogwild", "leashed", "ad-psgd", "parameter-server(mode=async)"]
OWN_RULE = ["downpour(push=3, fetch=2)", "adaptive-revision"]  # AdaGrad at the servers
