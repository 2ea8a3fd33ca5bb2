"""Every message survives the conversion to protobuf and back, and both descriptions of the protocol agree."""

from __future__ import annotations

import dataclasses
import enum
import typing

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.wire import convert, limits
from ttp.wire.limits import WireError
from ttp.wire.v1 import buddy_pb2, rounds_pb2
from ttp.wire.v1 import controller_pb2 as pb

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXTS.filter(lambda name: "\0" not in name)
FILE_NAMES = st.text("abcXYZ019._-@", max_size=20)
KINDS = [*convert.REPORTS, *convert.ORDERS]


def values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Return a strategy for instances of a message, within the ranges of the wire."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: of(f.name, hints[f.name]) for f in dataclasses.fields(kind)})


def of(name: str, hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    if typing.get_origin(hint) is tuple:
        return st.lists(of(name, typing.get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return values(hint)
    base = getattr(hint, "__supertype__", hint)
    if base is int:
        return st.integers(0, min(2**31 - 1, limits.NUMBERS.get(name, 2**31)))
    return {
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        str: FILE_NAMES if name in limits.FILE_NAMES else TEXTS if name in limits.TEXTS else NAMES,
    }[base]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    @settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
    @given(values(kind))
    def check(message: typing.Any) -> None:
        if kind in convert.REPORTS:
            wire = pb.RankReport.FromString(convert.report_to_wire(message).SerializeToString())
            assert convert.report_from_wire(wire) == message
        else:
            order = pb.ControllerOrder.FromString(convert.order_to_wire(message).SerializeToString())
            assert convert.order_from_wire(order) == message

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_both_sides_have_the_same_fields(kind: type) -> None:
    ours = {f.name for f in dataclasses.fields(kind)}
    theirs = {f.name for f in getattr(pb, kind.__name__).DESCRIPTOR.fields}
    assert ours == theirs


def test_every_enum_value_is_on_the_wire() -> None:
    kinds: list[type[enum.Enum]] = [m.Phase, m.FaultKind, m.GoodbyeReason, m.RefusalCode, How]
    for kind in kinds:
        for value in kind:
            assert convert.enum_from_wire(kind, convert.enum_to_wire(value)) is value


@pytest.mark.parametrize("file", [pb.DESCRIPTOR, rounds_pb2.DESCRIPTOR, buddy_pb2.DESCRIPTOR], ids=lambda f: f.name)
def test_the_numbers_of_removed_fields_are_reserved(file: typing.Any) -> None:
    for name, message in file.message_types_by_name.items():
        made = DescriptorProto()
        message.CopyToProto(made)
        numbers = {field.number for field in made.field}
        taken = numbers.union(*(range(gap.start, gap.end) for gap in made.reserved_range))
        assert taken == set(range(1, max(taken, default=0) + 1)), name


def test_a_text_that_is_not_valid_unicode_arrives_with_escapes() -> None:
    """The name of a file that is not UTF-8 comes into the text of an exception in this way."""
    fault = m.Fault(Rank(0), Rank(0), m.FaultKind.EXCEPTION, "no file x\udcff", "\ud800", "nonce")
    arrived = dataclasses.replace(fault, text="no file x\\udcff", detail="\\ud800")
    assert convert.report_from_wire(convert.report_to_wire(fault)) == arrived
    view = RestoreView(Rank(0), (Candidate(Version(1), "digest", "name"),), ("a", "b\udcff"), ())
    assert convert.report_from_wire(convert.report_to_wire(view)) == dataclasses.replace(
        view, skipped=("a", "b\\udcff")
    )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.RankReport(), "without a report"),
        (pb.RankReport(heartbeat=pb.Heartbeat(rank=1)), "UNSPECIFIED is not known"),
        (pb.RankReport.FromString(b"\x12\x04\x08\x01\x18\x63"), "heartbeat: Phase 99 is not known here"),
        (pb.ControllerOrder(), "without a order"),
    ],
)
def test_an_empty_message_and_an_unknown_enum_are_refused_in_words(message: typing.Any, text: str) -> None:
    with pytest.raises(WireError, match=text):
        (convert.report_from_wire if isinstance(message, pb.RankReport) else convert.order_from_wire)(message)
