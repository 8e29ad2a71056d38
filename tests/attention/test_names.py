"""Composed names: one spelling for each mechanism, one line for each mistake."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest
import torch
from cases import NAMES, geometry
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield import FarfieldConfig, FarfieldForCausalLM
from farfield.algebra.rotation import RotationFrame
from farfield.attention import Geometry, Tokens, mechanisms
from farfield.attention.mechanism import Carry, State, Transport, end
from farfield.attention.mechanisms import Row, canonical, parse, register, slug, table

number = st.floats(-1e6, 1e6, allow_nan=False).map(repr) | st.integers(-9, 9).map(str)
large = st.sampled_from(["1e20", "2.5E+16", "1e-7", "-0.0", "0.1234567890123", "1e300"])
OPTIONS = {
    "rope": {
        "frequencies": st.sampled_from(["rotary", "mixing"]),
        "scaling": st.sampled_from(["none", "linear", "ntk", "yarn"]),
        "factor": st.sampled_from(["1", "1.0", "2", "8.5", "1e3"]),
    },
    "forget": {"longest": st.sampled_from(["0", "64", "1e3"])},
    "window": {"size": st.integers(0, 99).map(str), "sinks": st.integers(0, 4).map(str)},
    "logn": {"scale": st.sampled_from(["learned", "fixed"])},
    "learned": {
        "frequencies": st.sampled_from(["rotary", "mixing"]),
        "c": number | large.filter(lambda text: "+" not in text),
        "source": st.sampled_from(["hidden", "token"]),
        "std": st.sampled_from(["0", "0.02", "0.1", "2e-2"]),
    },
    "random": {},
    "random_iid": {},
    "nope": {},
    "alibi": {},
}


@st.composite
def spelled(draw: st.DrawFn, head: str) -> str:
    """A part with any of its options in any order, the first perhaps without its name."""
    options = OPTIONS[head]
    keys = draw(st.permutations(sorted(options)))
    chosen = [(key, draw(options[key])) for key in keys if draw(st.booleans())]
    items = [f"{key}={value}" for key, value in chosen]
    if chosen and chosen[0][0] == next(iter(options)) and draw(st.booleans()):
        items[0] = chosen[0][1]
    return head + (":" + ",".join(items) if items else "")


@st.composite
def composed(draw: st.DrawFn) -> tuple[str, str]:
    """Two spellings of one mechanism: its parts in two orders."""
    transport = draw(st.sampled_from([None, "nope", "rope", "random", "random_iid", "learned"]))
    parts = [] if transport is None else [draw(spelled(transport))]
    if transport not in (None, "nope") and draw(st.booleans()):
        parts.append("v")
    controls = [
        *draw(st.sampled_from([[], ["alibi"], ["forget"]])),
        *(name for name in ("window", "logn") if draw(st.booleans())),
    ]
    parts += [draw(spelled(name)) for name in controls or ([] if parts else ["alibi"])]
    return "+".join(draw(st.permutations(parts))), "+".join(parts)


def meaning(name: str) -> Any:
    """What a name says, without its spelling."""
    found = parse(name)
    return (
        found.transport.row.name,
        tuple(asdict(found.transport.options).items()),
        found.carried,
        [(control.row.name, tuple(asdict(control.options).items())) for control in found.controls],
    )


@given(composed())
def test_a_canonical_name_is_one_spelling_of_one_meaning(names: tuple[str, str]) -> None:
    first, second = names
    one = canonical(first)
    assert canonical(second) == one
    assert canonical(one) == one
    assert meaning(one) == meaning(first)
    assert re.fullmatch(r"[A-Za-z0-9_~+=,.-]+", slug(first))
    assert slug(second) == slug(first)


@given(composed(), composed())
def test_names_of_different_meaning_have_different_folders(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    assert (slug(one[0]) == slug(two[0])) == (meaning(one[0]) == meaning(two[0]))


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_the_table_are_canonical(name: str) -> None:
    assert canonical(name) == name
    assert len({slug(other).lower() for other in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("given_name", "one"),
    [
        ("alibi+v+learned", "learned+v+alibi"),
        ("nope+alibi", "alibi"),
        ("alibi", "alibi"),
        ("nope", "nope"),
        ("rope:", "rope"),
        ("rope:rotary", "rope"),
        ("rope:frequencies=mixing", "rope:mixing"),
        ("learned:frequencies=rotary", "learned:rotary"),
        ("learned:source=token,c=0", "learned:c=0,source=token"),
        ("learned:std=0.02,mixing,c=1", None),
        ("learned:mixing,c=1.0,std=2e-2", "learned"),
        ("learned:c=-0.0", "learned:c=0"),
        ("learned:c=1e20", "learned:c=1e20"),
        ("learned:c=0.12345678", "learned:c=0.12345678"),
        ("learned:c=1E-7", "learned:c=1e-07"),
    ],
)
def test_spellings(given_name: str, one: str | None) -> None:
    if one is None:  # only the first option may go without its name
        with pytest.raises(ValueError, match="unknown option 'mixing' of 'learned'"):
            canonical(given_name)
    else:
        assert canonical(given_name) == one


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leanred+v", ["unknown mechanism 'leanred' in 'leanred+v'", "did you mean 'learned'?"]),
        ("rop", ["unknown mechanism 'rop'", "did you mean 'rope'?", "transports: nope, rope,"]),
        ("Rope", ["unknown mechanism 'Rope'", "did you mean 'rope'?"]),
        ("zzz", ["unknown mechanism 'zzz'", "v carries values", "controls: alibi"]),
        ("", ["unknown mechanism ''"]),
        ("rope++v", ["unknown mechanism '' in 'rope++v'"]),
        ("rope +v", ["unknown mechanism 'rope '", "did you mean 'rope'?"]),
        ("rope+rope", ["names 2 transports (rope, rope); expected at most one"]),
        ("rope+learned", ["names 2 transports (rope, learned); expected at most one"]),
        ("alibi+rope+alibi", ["names alibi and alibi, which both set the potential"]),
        ("rope+forget+alibi", ["names alibi and forget, which both set the potential"]),
        ("window:4+logn+window:5", ["names window and window, which both set the window"]),
        ("rope+v+v", ["carries values twice"]),
        ("v", ["can't carry values: there is no transport", "'rope+v'"]),
        ("nope+v", ["can't carry values: there is no transport"]),
        ("v+alibi", ["can't carry values: there is no transport"]),
        ("rope+v:far", ["'v' in 'rope+v:far' takes no options, got 'far'"]),
        ("rope:mixin", ["option 'frequencies' of 'rope'", "did you mean 'mixing'?"]),
        ("rope:zzz", ["is 'zzz' (one of: rotary, mixing)"]),
        ("rope:freqs=mixing", ["unknown option 'freqs'", "did you mean 'frequencies'?"]),
        ("random:3", ["unknown option '3' of 'random'", "(options: none)"]),
        ("learned:c=x", ["option 'c' of 'learned'", "is 'x'; expected a finite float"]),
        ("learned:c=nan", ["expected a finite float"]),
        ("learned:c=-inf", ["expected a finite float"]),
        ("learned:c=", ["is ''; expected a finite float"]),
        ("learned:c", ["option 'frequencies' of 'learned'", "is 'c' (one of: rotary, mixing)"]),
        ("learned:c=0,c=1", ["option 'c' of 'learned' is given twice"]),
        ("rope:mixing,frequencies=rotary", ["option 'frequencies' of 'rope' is given twice"]),
    ],
)
def test_a_mistake_is_one_line_that_helps(name: str, said: list[str]) -> None:
    with pytest.raises(ValueError, match=r"mechanism|option|takes no") as caught:
        canonical(name)
    message = str(caught.value)
    assert "\n" not in message
    for words in said:
        assert words in message


@dataclass(frozen=True)
class Options:
    """The options of a mechanism of the user's own."""

    rate: float = 0.5
    turns: Literal["slow", "fast"] = "slow"


class Clock(Transport):
    """M_t = R(-rate · t): a step that grows along the row, the same for every block."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        super().__init__()
        self.blocks = geometry.head_dim // 2
        self.rate = nn.Parameter(torch.tensor(options.rate))

    def forward(self, tokens: Tokens, state: State) -> Carry:
        position = tokens.position[:, None, :, None].float()
        angle = (self.rate * position).expand(-1, -1, -1, self.blocks)
        frame = RotationFrame.from_angles(tokens.real(angle), end(state, "clock"))
        return Carry(frame, state={"clock": frame.trail})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A user's row, registered for one test."""
    monkeypatch.setattr(mechanisms, "_TABLE", dict(mechanisms._TABLE))
    row = Row("clock", "transport", "a clock", "M_t = R(-rate t)", Options, Clock)
    register(row)
    return row


def test_a_transport_says_whether_it_contracts(clock: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "contracts", True)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    model = FarfieldForCausalLM(FarfieldConfig(mechanism="clock", **sizes))
    with pytest.raises(ValueError, match="Clock gives no contraction, and declares contracts = Tr"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_a_mechanism_of_the_users_own_trains_and_decodes(clock: Row) -> None:
    assert table()[-1] is clock
    assert canonical("alibi+v+clock:turns=fast,rate=0.25") == "clock:0.25,turns=fast+v+alibi"
    config = FarfieldConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        train_length=8,
        mechanism="clock+v+alibi",
    )
    model = FarfieldForCausalLM(config)
    model.initialise(0)
    ids = torch.randint(11, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    rate: Tensor = model.model.layers[0].self_attn.mechanism.transport.rate
    assert rate.grad is not None
    assert losses[-1] < losses[0] - 0.01
    model.eval()
    whole = model(ids).logits
    first = model(ids[:, :4], use_cache=True)
    rest = model(ids[:, 4:], cache=first.cache).logits
    torch.testing.assert_close(rest, whole[:, 4:], rtol=0.0, atol=1e-5)


@dataclass(frozen=True)
class NoDefault:
    """Options that a bare name couldn't fill."""

    rate: float


@dataclass(frozen=True)
class Unspellable:
    """Options that a name can't spell."""

    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Flag:
    """bool("false") is true: a flag would be read wrongly."""

    on: bool = False


@dataclass(frozen=True)
class Factory:
    """A default that is made anew can't be compared with what a name says."""

    rate: float = field(default_factory=float)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("rope", Options, "'rope' is already registered"),
        ("v", Options, "'v' is already registered"),
        ("a+b", Options, "'a\\+b' is not an identifier"),
        ("mine", NoDefault, "every option of mechanism 'mine' needs a default"),
        ("mine", Factory, "every option of mechanism 'mine' needs a default"),
        ("mine", Unspellable, "option 'sizes' of mechanism 'mine'"),
        ("mine", Flag, "option 'on' of mechanism 'mine'"),
    ],
)
def test_a_row_that_no_name_could_reach_is_refused(name: str, options: type, said: str) -> None:
    before = table()
    with pytest.raises(ValueError, match=said):
        register(Row(name, "transport", "", "", options, Clock))
    assert table() == before


def test_a_mechanism_without_a_transport_carries_no_values() -> None:
    with pytest.raises(ValueError, match="values can only be carried along a transport"):
        mechanisms.Mechanism(None, True)
    assert mechanisms.build("alibi", geometry()).transport is None


def test_a_control_says_what_it_sets() -> None:
    with pytest.raises(ValueError, match="a control names the field it sets"):
        register(Row("mine", "control", "", "", Options, Clock))
    with pytest.raises(ValueError, match="a control names the field it sets"):
        register(Row("mine", "transport", "", "", Options, Clock, sets="potential"))


@pytest.mark.parametrize("name", ["window", "forget", "logn"])
def test_controls_that_need_the_training_length_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* needs the training length"):
        mechanisms.build(name, geometry(train_length=None))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rope:factor=4", "option 'factor' of 'rope' is 4 and nothing is scaled by it; .* yarn"),
        ("rope:scaling=ntk,factor=0.5", "option 'factor' of 'rope' is 0.5; expected at least 1"),
        ("rope:scaling=yarm", "option 'scaling' of 'rope' .* did you mean 'yarn'"),
    ],
)
def test_a_scaling_that_says_nothing_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mechanisms.build(name, geometry())


def test_yarn_needs_the_training_length() -> None:
    name = "rope:scaling=yarn,factor=2"
    with pytest.raises(ValueError, match="rope:scaling=yarn needs the training length"):
        mechanisms.build(name, geometry(train_length=None))
    assert mechanisms.build(name, geometry(train_length=64)).transport is not None
