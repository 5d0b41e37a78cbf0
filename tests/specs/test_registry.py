import contextlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.specs.registry import Registry, Spec, build_optimizer, parse_spec
from paceline.specs.text import split_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class NoBackoff(Backoff):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Backoff):
    start_s: float = 1e-6
    tries: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Leashed:
    """Test double of an algorithm."""

    persistence: int | None = None
    momentum: float = 0.9
    nesterov: bool = False
    lock: Literal["none", "mutex", "read-write"] = "mutex"
    backoff: Backoff = field(default_factory=NoBackoff)
    spare: Backoff | None = None

    def __post_init__(self):
        if self.momentum < 0:
            raise ValueError("momentum must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Needy:
    clock_bound: int
    hook: object = None
    label: str = "plain"


def registries():
    backoffs = Registry("back-off")
    backoffs.register("none", NoBackoff)
    backoffs.register("linear", Linear)
    algorithms = Registry("algorithm", nested={Backoff: backoffs})
    algorithms.register("leashed", Leashed)
    algorithms.register("ad-psgd", Needy)
    return algorithms


def test_a_class_that_users_cannot_choose_has_a_spec_and_is_not_built():
    @dataclass(frozen=True)
    class Internal:
        unlisted_name: ClassVar[str] = "internal"

    backoffs = Registry("back-off")
    assert backoffs.spec(Internal()) == "internal"
    with pytest.raises(UsageError, match=r"Unknown back-off 'internal'.* Known: none yet\."):
        backoffs.build("internal")
    backoffs.register("linear", Linear)
    with pytest.raises(ValueError, match="already registered"):
        backoffs.register("linear", NoBackoff)


def test_values_of_every_kind():
    spec = parse_spec(" name-1( a=1, b=-2.5e-3 ,c=true,d=none,e=a-word,f=nested(x=1,y=deep(z=2)), g=empty(), h=inf ) ")
    assert spec.name == "name-1"
    assert spec.arguments == {
        "a": 1,
        "b": -0.0025,
        "c": True,
        "d": None,
        "e": "a-word",
        "f": Spec("nested", {"x": 1, "y": Spec("deep", {"z": 2})}),
        "g": Spec("empty"),
        "h": float("inf"),
    }
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("", 1, "expected a name"),
        ("leashed(", 8, "never closed"),
        ("leashed(persistence=1", 8, "never closed"),
        ("leashed(a=b(c=1)", 8, "never closed"),
        ("leashed)", 8, "closes nothing"),
        ("leashed()x", 10, "end of the spec"),
        ("leashed(1)", 9, "argument's name"),
        ("leashed(a)", 9, "write a=value"),
        ("leashed(a=)", 11, "expected a value"),
        ("leashed(a=1 b=2)", 13, "',' or ')'"),
        ("leashed(a=1,)", 13, "expected an argument"),
        ("leashed(a=1,a=2)", 13, "given twice"),
        ("-x", 1, "not a name"),
        ("x(a=+y)", 5, "neither a number nor a word"),
        ("x" + "(a=x" * 40, 66, "deep"),
    ],
)
def test_what_is_no_spec_is_refused_with_its_position(text, position, says):
    with pytest.raises(UsageError, match=f"position {position}:") as error:
        parse_spec(text)
    assert says in str(error.value)


@given(st.text(max_size=30) | st.text(alphabet="ab(=,)1.- ", max_size=30))
def test_any_text_parses_or_is_a_usage_error(text):
    with contextlib.suppress(UsageError):
        assert parse_spec(str(parse_spec(text))) == parse_spec(text)


def test_lists_split_outside_parentheses():
    assert split_specs("a, b(x=1,y=c(z=2)) ,d") == ["a", "b(x=1,y=c(z=2))", "d"]
    for bad in ("a,,b", "a,", "", "a(b=1,c", "a),b"):
        with pytest.raises(UsageError):
            split_specs(bad)


BACKOFFS = st.builds(NoBackoff) | st.builds(
    Linear, start_s=st.floats(allow_nan=False), tries=st.none() | st.integers(-(2**70), 2**70)
)


@given(
    st.builds(
        Leashed,
        persistence=st.none() | st.integers(0, 100),
        momentum=st.floats(0, 1),
        nesterov=st.booleans(),
        lock=st.sampled_from(["none", "mutex", "read-write"]),
        backoff=BACKOFFS,
        spare=st.none() | BACKOFFS,
    )
)
def test_build_inverts_spec(algorithm):
    registry = registries()
    assert registry.build(registry.spec(algorithm)) == algorithm
    assert registry.build(registry.spec(algorithm, defaults=True)) == algorithm


def test_canonical_spec_omits_defaults():
    registry = registries()
    assert registry.spec(Leashed()) == "leashed"
    assert registry.spec(registry.build("leashed( momentum=0.9, persistence=2,backoff=linear())")) == (
        "leashed(persistence=2, backoff=linear)"
    )
    assert registry.spec(Leashed(spare=NoBackoff())) == "leashed(spare=none())"
    assert registry.template("leashed") == (
        "leashed(persistence=none, momentum=0.9, nesterov=false, lock=mutex, backoff=none, spare=none)"
    )
    assert registry.template("ad-psgd") == "ad-psgd(clock_bound=..., hook=..., label=plain)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("leeshed", ["Unknown algorithm 'leeshed'", "Did you mean 'leashed'?", "Known: leashed, ad-psgd"]),
        ("ad_psgd", ["Did you mean 'ad-psgd'?"]),
        ("leashed(persistance=1)", ["no argument 'persistance'", "'persistence'", "Valid: persistence, momentum"]),
        ("leashed(persistence=1.5)", ["'persistence' must be a whole number or none, not '1.5'"]),
        ("leashed(persistence=true)", ["a whole number or none"]),
        ("leashed(momentum=high)", ["must be a number, not 'high'"]),
        ("leashed(nesterov=1)", ["true or false"]),
        ("leashed(lock=mutexx)", ["one of none, mutex, read-write", "Did you mean 'mutex'?"]),
        ("leashed(lock=mutex(x=1))", ["one of none, mutex, read-write"]),
        ("leashed(backoff=lineal)", ["'backoff'", "Unknown back-off 'lineal'", "'linear'"]),
        ("leashed(backoff=linear(slope=1))", ["'backoff'", "'linear' has no argument 'slope'"]),
        ("leashed(backoff=3)", ["one of none, linear"]),
        ("leashed(momentum=-1)", ["is invalid", "momentum must be 0 or more"]),
        ("ad-psgd", ["needs clock_bound", "ad-psgd(clock_bound=...)"]),
        ("ad-psgd(clock_bound=1, hook=2)", ["'hook' cannot be written in a spec"]),
    ],
)
def test_messages_name_the_mistake_and_the_remedy(text, says):
    with pytest.raises(UsageError) as error:
        registries().build(text)
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_no_spec_can_express_is_said():
    registry = registries()
    assert registry.spec(Needy(clock_bound=1, label="with-hyphen")) == "ad-psgd(clock_bound=1, label=with-hyphen)"
    for instance in (Needy(clock_bound=1, hook=print), Needy(clock_bound=1, label="a, b=2"), Needy(clock_bound=True)):
        with pytest.raises(UsageError, match="cannot be written"):
            registry.spec(instance)
    with pytest.raises(UsageError, match="register it"):
        registry.spec(NoBackoff())


def test_registering_twice_is_an_error():
    registry = registries()
    for name, cls in (("leashed", Linear), ("other", Leashed), ("bad name", Linear), ("text", str)):
        with pytest.raises(ValueError, match=r"registered|letters"):
            registry.register(name, cls)


def parameters():
    return [torch.nn.Parameter(torch.zeros(3))]


def test_optimizers_by_name_with_their_arguments():
    adamw = build_optimizer("AdamW(weight_decay=0.1, beta2=0.99)", parameters(), 0.01, None)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["lr"], adamw.defaults["weight_decay"]) == (0.01, 0.1)
    assert adamw.defaults["betas"] == (0.9, 0.99)
    sgd = build_optimizer("sgd(nesterov=true, lr=0.5)", parameters(), None, 0.9)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.5, 0.9, True)
    assert build_optimizer("adam", parameters(), 0.01, 0.0).defaults["lr"] == 0.01
    for name in ("rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "adafactor"):
        build_optimizer(name, parameters(), 0.01, None)


@pytest.mark.parametrize(
    ("text", "momentum", "says"),
    [
        ("lbfgs", None, "several times per step"),
        ("SparseAdam", None, "sparse gradients"),
        ("adamm", None, "Did you mean 'adam'?"),
        ("optimizer", None, "Unknown optimizer"),
        ("adam(weight_decai=1)", None, "'weight_decay'"),
        ("adam(betas=1)", None, "beta1"),
        ("adam(beta1=2)", None, "is invalid"),
        ("adam(amsgrad=1)", None, "true or false"),
        ("sgd(weight_decay=word)", None, "must be a number"),
        ("sgd(weight_decay=-1)", None, "is invalid"),
        ("sgd(nesterov=true)", None, "is invalid"),
        ("adam", 0.9, "no momentum"),
        ("sgd(params=1)", None, "no argument 'params'"),
    ],
)
def test_optimizers_that_cannot_be(text, momentum, says):
    with pytest.raises(UsageError) as error:
        build_optimizer(text, parameters(), 0.1, momentum)
    assert says in str(error.value)
