"""The drawings of the concepts' pages; `Canvas` gives them the page's colours."""

from .canvas import Canvas


def files() -> dict[str, str]:
    """Each function below that is in `DRAWINGS`, as a file."""
    return {f"generated/drawing-{draw.__name__}.svg": draw().svg() for draw in DRAWINGS}


def staleness() -> Canvas:
    """Three workers, one vector; one gradient meets two updates of others."""
    one = Canvas(
        720,
        236,
        "A gradient computed at version 4 is applied as version 7, after two updates of other workers, so its staleness is 2",
    )
    one.text(90, 26, "version", "label end small")
    for number in range(6):
        x = 130 + number * 100
        one.box(x - 17, 10, 34, 24, str(4 + number), "marked" if number in (0, 3) else "box")
        one.line((x, 34), (x, 214), kind="dashed")
    for row, name in enumerate(("worker 0", "worker 1", "worker 2")):
        one.text(90, 82 + row * 56, name, "label end")
    one.box(130, 64, 292, 28, "gradient of worker 0, read at version 4", "marked")
    one.arrow((422, 78), (429, 78), words="")
    one.box(150, 120, 74, 28, "gradient")
    one.box(236, 120, 290, 28, "gradient")
    one.box(172, 176, 152, 28, "gradient")
    one.box(336, 176, 288, 28, "gradient")
    one.text(440, 74, "applied: version 7", "label strong")
    one.text(440, 91, "staleness = 6 - 4 = 2", "label")
    one.text(130, 230, "Worker 1 made version 5, worker 2 version 6.", "label small")
    return one


def versions() -> Canvas:
    """A counter, and who reads it when."""
    one = Canvas(
        720, 190, "Each update takes the next number of an atomic counter, so no two updates have the same version"
    )
    one.box(290, 16, 140, 40, "counter: 7", "shared")
    one.box(30, 96, 190, 44, "worker 0\nreads version 7")
    one.box(265, 96, 190, 44, "worker 1\nupdates: 7 becomes 8")
    one.box(500, 96, 190, 44, "worker 2\nupdates: 8 becomes 9")
    one.arrow((290, 44), (130, 94))
    one.arrow((360, 94), (360, 58))
    one.arrow((594, 94), (432, 44))
    one.text(
        360,
        172,
        "One atomic addition gives each update its own number.",
        "label small middle",
    )
    return one


def memory() -> Canvas:
    """Where the parameters lie under each kind of memory."""
    one = Canvas(740, 280, "Six kinds of shared parameters: racing, locked, slots, replicated, own models, served")
    kinds = (
        ("racing", "one vector, all write at once", ("x",), "may be torn; an addition can be lost"),
        ("locked", "one vector behind a lock", ("x, locked",), "consistent; writers wait"),
        ("slots", "a few vectors, never changed", ("8", "9", "10"), "consistent; no worker waits"),
        ("replicated", "one each, kept equal", ("x", "x", "x"), "equal bit for bit; all wait"),
        ("own models", "one each, averaged", ("x0", "x1", "x2"), "the run's model is their mean"),
        (
            "served",
            "shards at servers, copies at workers",
            ("shard 0", "shard 1"),
            "copies are as old as the last answer",
        ),
    )
    for number, (name, what, vectors, promise) in enumerate(kinds):
        x, y = 10 + number % 3 * 244, 10 + number // 3 * 136
        one.box(x, y, 232, 124, kind="box")
        one.text(x + 12, y + 22, name, "label strong").text(x + 12, y + 40, what, "label small")
        width = min(92, 204 / len(vectors) - 6)
        for index, vector in enumerate(vectors):
            one.box(x + 14 + index * (width + 8), y + 54, width, 34, vector, "warned" if name == "racing" else "shared")
        one.text(x + 12, y + 112, promise, "label small")
    return one


def lost_update() -> Canvas:
    """Two workers add to one component at the same instant."""
    one = Canvas(720, 190, "Both workers read 5.0, both write their own sum, and the first sum is overwritten")
    one.text(84, 62, "worker 0", "label end").text(84, 122, "worker 1", "label end")
    one.box(100, 42, 130, 32, "reads 5.0").box(250, 42, 150, 32, "5.0 + 0.3").box(
        420, 42, 130, 32, "writes 5.3", "warned"
    )
    one.box(130, 102, 130, 32, "reads 5.0").box(280, 102, 150, 32, "5.0 + 0.1").box(
        450, 102, 130, 32, "writes 5.1", "marked"
    )
    one.text(600, 88, "5.1, not 5.4", "label strong")
    one.arrow((100, 160), (690, 160)).text(100, 180, "time", "label small")
    one.text(360, 24, "one component of x", "label small middle")
    return one


def ports() -> Canvas:
    """A program, its ports, and three implementations."""
    one = Canvas(
        740, 250, "A program sees only its ports, which real memory, launchers' messages or the simulator implement"
    )
    one.box(20, 90, 170, 60, "work(replica, ports)\none worker's program", "marked")
    names = ("shared", "collectives", "mailbox", "clock, random")
    for number, name in enumerate(names):
        y = 28 + number * 52
        one.box(260, y, 150, 36, name)
        one.arrow((190, 120), (258, y + 18))
    for number, (name, what) in enumerate(
        (
            ("one machine", "one segment, Unix sockets"),
            ("launchers", "own memory, Gloo, ZeroMQ"),
            ("simulator", "virtual clock, network"),
        )
    ):
        y = 28 + number * 70
        one.box(500, y, 220, 52, f"{name}\n{what}", "shared")
        one.arrow((410, 126), (498, y + 26))
    return one


def loop() -> Canvas:
    """How control passes between a user's loop and a program."""
    one = Canvas(770, 238, "The loop's batch and step hand control to the program and back")
    one.text(20, 52, "your loop", "label strong").text(20, 176, "program", "label strong")
    steps = (
        (100, "for x, y in\nworker.batches(loader)"),
        (300, "forward and\nbackward"),
        (458, "optimizer.step()\nbefore"),
        (616, "optimizer.step()\nafter"),
    )
    for x, words in steps:
        one.box(x, 24, 144, 48, words, "marked")
    programs = (
        (100, "reads the parameters,\nasks for a gradient"),
        (458, "binds the parameters\nto the target"),
        (616, "publishes,\ncounts a version"),
    )
    for x, words in programs:
        one.box(x, 148, 140, 48, words, "shared")
        one.arrow((x + 48, 72), (x + 48, 146))
        one.arrow((x + 92, 148), (x + 92, 74))
    one.arrow((244, 48), (298, 48)).arrow((444, 48), (456, 48)).arrow((602, 48), (614, 48))
    one.text(370, 226, "Both are blocking code in one thread: a greenlet switches between them.", "label small middle")
    return one


def epochs() -> Canvas:
    """Batches that workers claim, and rounds that they share."""
    one = Canvas(720, 218, "Asynchronous workers claim the next batch; lockstep workers share each round")
    one.text(20, 24, "asynchronous: each worker takes the next free batch, a slow one takes fewer", "label small")
    for number, worker in enumerate((0, 1, 1, 1, 0, 1, 1, 1, 0, 1)):
        one.box(20 + number * 66, 36, 60, 32, f"{number}: w{worker}", "marked" if worker else "shared")
    one.text(20, 118, "lockstep: a round is one batch for each worker, and one step", "label small")
    for number in range(10):
        one.box(20 + number * 66, 130, 60, 32, f"{number}: w{number % 2}", "marked" if number % 2 else "shared")
        if number % 2 == 0:
            one.line((20 + number * 66, 170), (146 + number * 66, 170))
            one.text(83 + number * 66, 188, f"round {number // 2}", "label small middle")
    return one


def rounds() -> Canvas:
    """A round in shared memory, what a death changes in it, and how a replacement becomes a member."""
    one = Canvas(
        760,
        290,
        "A round has two barriers; a dead worker's gradient counts once it has passed the first; a replacement is let in "
        "between two rounds",
    )
    one.text(10, 22, "a round", "label strong")
    steps = ("each member\ntrains on its batch", "first barrier:\nvectors are there", "each reduces\nits part")
    for number, words in enumerate((*steps, "second barrier:\nparts are reduced", "all make\nthe same step")):
        one.box(10 + number * 150, 34, 132, 46, words, "shared" if "barrier" in words else "marked")
        if number:
            one.arrow((number * 150 - 8, 57), (8 + number * 150, 57))
    deaths = ("dies here: left out,\nbatch dealt again", "dies here: its vector\ncounts, others reduce\nits part")
    for number, words in enumerate((*deaths, "dies here: left out\nof the next round")):
        x = 10 + number * 300
        one.box(x, 110, 136, 56, words, "warned")
        one.arrow((x + 66, 108), (x + 66, 82))
    one.text(10, 206, "a worker", "label strong")
    states = ("member", "dead", "replacement\nasks", "let in: no batch\nin this round", "compared\nfor ten rounds")
    for number, words in enumerate(states):
        one.box(10 + number * 150, 218, 132, 46, words, ("marked", "warned", "box", "box", "marked")[number])
        if number:
            one.arrow((number * 150 - 8, 241), (8 + number * 150, 241))
    return one


def averaging() -> Canvas:
    """An exchange, as two differences."""
    one = Canvas(
        720,
        232,
        "Two workers exchange models and each adds half the difference, so their sum is the same before and after",
    )
    one.text(84, 60, "worker 0", "label end").text(84, 170, "worker 1", "label end")
    one.box(100, 40, 110, 34, "x0 = 2", "marked").box(100, 150, 110, 34, "x1 = 6", "shared")
    one.arrow((210, 62), (330, 148), words="")
    one.text(216, 112, "request: 2", "label small")
    one.box(300, 150, 150, 34, "x1 + (2 - 6) / 2 = 4", "shared")
    one.arrow((400, 148), (500, 76))
    one.text(462, 118, "answer: +2", "label small")
    one.box(270, 40, 150, 34, "a gradient: x0 = 1.9", "marked")
    one.box(500, 40, 180, 34, "x0 + 2 = 3.9", "marked")
    one.text(100, 216, "2 + 6 - 0.1 = 3.9 + 4: only the gradient has changed the sum.", "label small")
    return one


def servers() -> Canvas:
    """Workers, shards, and a second copy."""
    one = Canvas(
        720,
        236,
        "Workers send each shard its part of the gradient; a second copy has every update before the worker gets its answer",
    )
    for number in range(3):
        one.box(20, 20 + number * 70, 130, 46, f"worker {number}", "marked")
    for number in range(2):
        y = 44 + number * 92
        one.box(330, y, 150, 52, f"server: shard {number}\nadmission, rule", "shared")
        one.box(570, y, 130, 52, f"second copy\nof shard {number}")
        one.arrow((480, y + 18), (568, y + 18)).arrow((568, y + 38), (482, y + 38))
        for worker in range(3):
            one.arrow((150, 43 + worker * 70), (328, y + 26))
    one.text(226, 20, "gradient", "label small middle").text(524, 36, "every update", "label small middle")
    one.text(360, 226, "A worker gets its answer once both have its update.", "label small middle")
    return one


def processes() -> Canvas:
    """Processes of one machine."""
    one = Canvas(
        720,
        236,
        "The command starts a fork server and a supervisor; workers come from the fork server and share one segment",
    )
    one.box(20, 90, 150, 48, "supervisor\n(your command)")
    one.box(230, 20, 150, 48, "fork server\nhas torch loaded")
    for number in range(3):
        one.box(450, 14 + number * 56, 110, 42, f"worker {number}", "marked")
        one.arrow((380, 44), (448, 35 + number * 56))
    one.box(230, 180, 330, 44, "arena: parameters, counters, locks, rings of records", "shared")
    one.arrow((120, 90), (228, 46))
    one.arrow((130, 138), (228, 200))
    one.line((505, 168), (505, 178))
    one.text(20, 166, "detects deaths,\nreplaces, ends", "label small")
    one.box(610, 126, 96, 42, "evaluates")
    one.arrow((560, 147), (608, 147))
    return one


def joining() -> Canvas:
    """The join point, and connections between workers."""
    one = Canvas(720, 240, "Workers of two machines meet at the join point and then talk to each other directly")
    one.box(290, 14, 140, 46, "join point\nplaces, addresses", "shared")
    one.box(20, 100, 200, 124).text(32, 120, "machine A", "label small")
    one.box(500, 100, 200, 124).text(512, 120, "machine B", "label small")
    for number in range(2):
        one.box(40, 130 + number * 46, 110, 36, f"worker {number}", "marked")
        one.box(560, 130 + number * 46, 110, 36, f"worker {number + 2}", "marked")
        one.arrow((150, 148 + number * 46), (558, 148 + number * 46)).arrow(
            (558, 154 + number * 46), (152, 154 + number * 46)
        )
    one.line((120, 98), (290, 40), kind="dashed").line((600, 98), (430, 40), kind="dashed")
    one.text(360, 96, "needed to join,\nnot to continue", "label small middle")
    one.text(360, 216, "models, between neighbours", "label small middle")
    return one


def records() -> Canvas:
    """From a worker's ring to the folder."""
    one = Canvas(
        740,
        200,
        "A worker writes rows into a ring in shared memory; the supervisor writes them to files, completely or not at all",
    )
    one.box(16, 60, 130, 50, "worker\none row per step", "marked")
    one.box(190, 60, 150, 50, "ring in the arena\nsurvives the worker", "shared")
    one.box(384, 60, 140, 50, "supervisor\nJSON Lines")
    one.box(570, 20, 156, 40, "temporary name").box(570, 84, 156, 40, "on the disk").box(
        570, 148, 156, 40, "renamed", "shared"
    )
    one.arrow((146, 85), (188, 85)).arrow((340, 85), (382, 85)).arrow((524, 76), (568, 42))
    one.arrow((648, 60), (648, 82)).arrow((648, 124), (648, 146))
    one.text(90, 150, "A kill between an update and its row is counted: records_lost.", "label small")
    return one


def simulation() -> Canvas:
    """The scheduler runs the program whose next event is earliest."""
    one = Canvas(
        740,
        226,
        "A scheduler runs one program at a time, the one with the earliest next event, and moves the virtual clock there",
    )
    one.text(20, 24, "virtual time", "label small").arrow((110, 20), (720, 20))
    rows = (
        ("worker 0", ((110, 200, "gradient"), (330, 200, "gradient"))),
        ("worker 1", ((110, 80, "gradient"), (210, 80, "gradient"), (310, 80, "gradient"))),
        ("link", ((192, 40, "msg"), (292, 40, "msg"))),
    )
    for number, (name, bars) in enumerate(rows):
        y = 44 + number * 48
        one.text(94, y + 20, name, "label end")
        for x, width, words in bars:
            one.box(x, y, width, 30, words, "shared" if name == "link" else "marked")
    one.text(
        110,
        208,
        "Gradients are real and computed one after the other; only their times are virtual.",
        "label small",
    )
    return one


def trials() -> Canvas:
    """Blocks of trials by seed."""
    one = Canvas(720, 196, "Trials run in blocks of one seed each; a slower machine slows all methods of a block alike")
    for block in range(3):
        x = 20 + block * 234
        one.box(x, 30, 220, 96).text(x + 12, 50, f"seed {block}: same start, same batches", "label small")
        for number, name in enumerate(("locked", "hogwild", "leashed")):
            one.box(x + 10 + number * 68, 64, 64, 40, name, ("marked", "shared", "warned")[number])
    one.arrow((20, 150), (700, 150)).text(
        20, 174, "time; compared within a block: pairs that differ in the method alone", "label small"
    )
    return one


def sparse() -> Canvas:
    """Copies that are merged from time to time."""
    one = Canvas(720, 200, "Each thread adds to its own copy and merges it into the weights from time to time")
    one.box(20, 20, 150, 44, "thread 0: rows", "marked").box(20, 120, 150, 44, "thread 1: rows", "marked")
    one.box(240, 20, 150, 44, "its copy").box(240, 120, 150, 44, "its copy")
    one.box(520, 66, 170, 52, "weights", "shared")
    one.arrow((170, 42), (238, 42)).arrow((170, 142), (238, 142))
    one.arrow((390, 42), (518, 82)).arrow((390, 142), (518, 104))
    one.text(452, 40, "every 128 updates", "label small middle")
    one.text(20, 190, 'discipline="shared", the paper\'s, has no copies: all threads write the weights.', "label small")
    return one


DRAWINGS = (
    staleness, versions, memory, lost_update, ports, loop, epochs, rounds, averaging, servers, processes, joining, records,
    simulation, trials, sparse,
)  # fmt: skip
