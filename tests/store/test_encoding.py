"""States come back as they were encoded; values that cannot be stored and damaged bytes are refused."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.store import arrays
from ttp.store.encoding import DEPTH_MAX, EncodingError, decode, encode
from ttp.store.repeated_encoding import RepeatedEncoder

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
st_numpy = pytest.importorskip("hypothesis.extra.numpy")

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),  # lone surrogates too: file names have them
    st.binary(),
)


@st.composite
def keys(draw: st.DrawFn, depth: int = 2) -> Any:
    make = draw(st.sampled_from([None, None, tuple, frozenset])) if depth else None
    return draw(PLAIN) if make is None else make(draw(keys(depth - 1)) for _ in range(draw(st.integers(0, 3))))


DTYPES = st.one_of(
    st_numpy.boolean_dtypes(),
    st_numpy.integer_dtypes(endianness="?"),
    st_numpy.floating_dtypes(endianness="?"),
    st_numpy.complex_number_dtypes(),
    st_numpy.unicode_string_dtypes(endianness="="),
    st_numpy.byte_string_dtypes(),
    st_numpy.datetime64_dtypes(),
)
ARRAYS = DTYPES.flatmap(lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, min_side=0, max_side=4)))
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@st.composite
def values(draw: st.DrawFn, depth: int = 3) -> Any:
    """Draw nested values. Written by hand, because the name of such a ``st.recursive`` is too long for hypothesis."""
    leaves = st.one_of(PLAIN, st.binary().map(bytearray), ARRAYS, tensors())
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(leaves)
    make = draw(st.sampled_from([list, tuple, set, frozenset, dict, OrderedDict]))
    if make in (set, frozenset):
        return make(draw(st.lists(keys(), max_size=4)))
    items = [draw(values(depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    if make in (list, tuple):
        return make(items)
    draw_key = draw(st.sampled_from([st.text(), keys()]))
    return make((draw(draw_key), item) for item in items)


def same(one: Any, other: Any) -> bool:
    """Compare type, value and order. NaN equals itself, and 1, 1.0 and True differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | numpy.ndarray | numpy.generic):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and arrays.memory_order(one) == arrays.memory_order(other) and same_bytes(one, other))
    if isinstance(one, dict):
        return same(list(one.keys()), list(other.keys())) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and sorted(map(repr, map(canonical, one))) == sorted(
            map(repr, map(canonical, other))
        )
    return repr(one) == repr(other)


def canonical(value: Any) -> Any:
    if isinstance(value, frozenset):
        return ("frozenset", sorted(repr(canonical(v)) for v in value))
    return tuple(map(canonical, value)) if isinstance(value, tuple) else value


def same_bytes(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.requires_grad == other.requires_grad and torch.equal(raw_bytes(one), raw_bytes(other)))
    return bool(one.tobytes() == other.tobytes())


def raw_bytes(tensor: Any) -> Any:
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


@settings(max_examples=80, deadline=None)
@given(values(), st.data())
def test_what_comes_back_is_what_went_in_or_damage_is_noticed(value: Any, data: st.DataObject) -> None:
    whole = encode(value)
    assert same(decode(whole), value)
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[at // 8] ^= 1 << at % 8
    for damaged in (bytes(flipped), whole[: at // 8]):
        with pytest.raises(EncodingError, match="encoded state"):
            decode(damaged)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(1).getstate(),
        numpy.random.RandomState(1).get_state(),
        numpy.random.default_rng(1).bit_generator.state,
        torch.random.get_rng_state(),
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        {0: {"step": torch.tensor(3.0)}, (1, "b"): {None: [True, 1, 1.0]}},
        [numpy.float64(1.5), numpy.bool_(True), numpy.int8(-3), numpy.str_("x"), numpy.datetime64("2026-01-01", "s")],
        numpy.arange(6).reshape(2, 3)[:, ::-1].T,
        numpy.asfortranarray(numpy.arange(24).reshape(2, 3, 4)),
        numpy.ones((4, 2, 6))[:, :1, ::2].transpose(2, 1, 0),
        torch.arange(6).reshape(2, 3).t(),
        [torch.rand(1, 5).t(), torch.rand(1, 5)[:, 0], torch.empty(2, 0, 3).permute(2, 1, 0)],
        torch.nn.Parameter(torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        [[[[[[[[()]]]]]]]],
        {"\udcff": "\udcff"},  # of the name of a file
        {"size": torch.Size([3, 4]), "dtype": torch.bfloat16, "on": [torch.device("cpu"), torch.device("cuda:1")]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_states_that_trainings_have(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert encode(decode(encode(value))) == encode(value)  # ranks that have restored theirs have the digest of others


def test_what_a_state_dict_says_about_itself_comes_back_with_it() -> None:
    """``load_state_dict()`` reads it: a TensorDict its sizes and nesting, spectral_norm() whether to solve for v."""
    state = {"model": torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()}
    for encoded in (encode(state), RepeatedEncoder("state").encode(state)):
        back = decode(encoded)
        assert same(back, state) and same(back["model"]._metadata, state["model"]._metadata)


@pytest.mark.parametrize("encoded", [encode, RepeatedEncoder("state").encode], ids=["at once", "repeatedly"])
def test_what_is_not_refused_for_its_depth_comes_back(encoded: Callable[[object], bytes]) -> None:
    """Two extensions stand for an OrderedDict with its ``_metadata``, and ``decode`` counts both."""

    def nested(levels: int) -> Any:
        outer: Any = OrderedDict(x=nested(levels - 1) if levels > 1 else 1)
        outer._metadata = {"version": 1}
        return outer

    deepest = nested(DEPTH_MAX // 2)
    assert same(decode(encoded(deepest)), deepest)
    with pytest.raises(EncodingError, match="nested deeper than 100"):
        encoded(nested(DEPTH_MAX // 2 + 1))


def test_arrays_come_back_writable() -> None:
    array, tensor = decode(encode([numpy.zeros(2), torch.zeros(2)]))
    array[0], tensor[0] = 1, 1
    assert array.tolist() == tensor.tolist() == [1, 0]


@pytest.mark.parametrize(("device", "name"), [("cpu", []), ("cuda:0", ["cuda"]), ("cuda:1", ["cuda:1"])])
def test_a_tensor_on_a_device_is_kept_with_its_device(
    device: str, name: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number if it is on the process's own, which another rank may have under another number."""
    monkeypatch.setitem(arrays._home, "cuda", torch.device("cuda:0"))
    assert arrays._elsewhere(torch.device(device)) == name


@pytest.mark.parametrize(("used", "where"), [(True, "meta"), (False, "cpu")])
def test_it_comes_back_on_a_device_that_the_process_uses(
    used: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [*arrays.pack_tensor(torch.ones(2)), "meta"]
    monkeypatch.setattr(torch, "meta", SimpleNamespace(is_initialized=lambda: used), raising=False)
    assert arrays.unpack_tensor(fields).device.type == where


class Foo:
    def __repr__(self) -> str:
        return "<Foo>"  # without an address: names of tests must be the same in every process

    def __hash__(self) -> int:
        return 2  # as must be the order of a set


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Foo(), r"extra_state: object of type .*Foo"),
        ({"x": [1, {3: Foo()}]}, r"extra_state\['x'\]\[1\]\[3\]: object of type .*Foo"),
        ({"x": (Foo(),)}, r"extra_state\['x'\]\[0\]: object of type .*Foo"),
        ({Foo(): 1}, r"extra_state key <.*Foo.*>: object of type .*Foo"),
        ({1, Foo()}, r"extra_state\{<.*Foo.*>\}: object of type .*Foo"),
        ([len], r"extra_state\[0\]: object of type builtins.builtin_function_or_method"),
        ([numpy.array([Foo()])], r"extra_state\[0\]: numpy array of dtype object"),
        ([numpy.zeros(2, "i4,f4")], r"extra_state\[0\]: numpy array of dtype"),
        ([numpy.ma.masked_array([1])], r"extra_state\[0\]: object of type numpy.ma"),
        ([torch.ones(2).to_sparse()], r"extra_state\[0\]: tensor with layout torch.sparse_coo"),
        ([torch.ones(2, device="meta")], r"extra_state\[0\]: tensor with layout torch.strided on meta"),
    ],
    ids=repr,
)
def test_what_cannot_be_stored_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(EncodingError, match=path):
        encode(value, "extra_state")


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize("value", [Odd(), memoryview(b"x"), msgpack.ExtType(1, b""), msgpack.Timestamp(1), range(3)])
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(EncodingError, match="object of type"):
        encode([value])


def test_a_container_inside_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodingError, match="contain itself"):
        encode(loop)


# ------------------------------------------------------------------------------------------------------------ bad bytes


def forged(body: bytes) -> bytes:
    """Return a body with correct magic and checksum, so that only the later checks can refuse it."""
    return encode(None)[:4] + xxhash.xxh3_64_digest(body) + body


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*range(1, 11), 16, 17, 18, 32, 33, 99]), values())
def test_forged_extensions_give_a_value_or_a_clear_error(code: int, value: Any) -> None:
    body = msgpack.packb(msgpack.ExtType(code, encode(value)[12:]), unicode_errors="surrogatepass")
    try:
        decode(forged(body))
    except EncodingError as problem:
        assert "encoded state" in str(problem)


def extension(code: int, value: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(value))))


def deep_tuple(depth: int) -> bytes:
    body = b"\x90"
    for _ in range(depth):
        body = bytes(msgpack.packb([msgpack.ExtType(1, body)]))
    return body


BOMBS = {
    "arrays that promise four thousand million items each": b"\xdd\xff\xff\xff\xff" * 200,
    "arrays that promise as many items as there are bytes": b"\xdd\x00\x1e\x00\x00" * 400_000,
    "a map": b"\xdf\xff\xff\xff\xff",
    "a text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xffx",
    "a scalar of nothing": b"\xc7\x00\x11",
    "an extension": b"\xc9\xff\xff\xff\xff\x01",
    "tuples in tuples": deep_tuple(300),
    "lists in lists": b"\x91" * 5000 + b"\xc0",
    "a numpy shape": extension(16, ["<f8", [2**40], b""]),
    "a negative shape": extension(16, ["<f8", [-1, -1], bytes(8)]),
    "a numpy object": extension(16, ["|O", [1], bytes(8)]),
    "a torch shape": extension(32, ["float32", [2**40], b"", False, False]),
    "a numpy shape that leaves bytes over": extension(16, ["<f8", [1], bytes(16)]),
    "a torch shape to be guessed": extension(32, ["float32", [-1], bytes(8), False, False]),
    "no dtype of torch": extension(32, ["load", [1], b"", False, False]),
    "no device of torch": extension(32, ["float32", [1], bytes(4), False, False, "moon"]),
    "half a pair": extension(5, [1]),
    "a word of no torch": extension(33, ["load", "x"]),
    "a size of words": extension(33, ["Size", ["x"]]),
    "a description of a number": extension(10, [1, {}]),
    "a list as a key": extension(5, [[1], 1]),
    "no list": extension(1, 1),
    "a kind of tomorrow": bytes(msgpack.packb(msgpack.ExtType(99, b""))),
    "two values": b"\xc0\xc0",
    "nothing": b"",
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_forged_bytes_that_must_be_refused(body: bytes) -> None:
    with pytest.raises(EncodingError, match="encoded state"):
        decode(forged(body))


def test_refusing_takes_no_memory() -> None:
    """In a process that may use at most 64 MiB more than at its start."""
    script = """
        import numpy, resource, sys  # numpy first: it needs more than the limit
        from ttp.store.encoding import EncodingError, decode
        bombs = [bytes.fromhex(line) for line in sys.stdin]
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        for bomb in bombs:
            try:
                decode(bomb)
            except EncodingError:
                print("refused")
    """
    bombs = [forged(body) for name, body in BOMBS.items() if "torch" not in name]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input="\n".join(bomb.hex() for bomb in bombs),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["refused"] * len(bombs), done.stderr


def test_no_framework_is_imported_for_plain_values() -> None:
    script = (
        "import sys; from ttp.store.encoding import *; decode(encode({'a': (1, {2}, 2**99)}));"
        "assert not {'torch', 'numpy', 'grpc', 'mindspore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
