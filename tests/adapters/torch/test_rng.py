"""Random streams are restored exactly, through the fast way (their memory) and through the official one."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from tests.adapters.torch.going_on import seed
from ttp.adapters.torch.local_state import capture
from ttp.adapters.torch.local_state import rng as torch_rng
from ttp.adapters.torch.local_state.rng import RngState, _split, _torch_state
from ttp.errors import CheckpointError
from ttp.processor.local_state import host_rng as rng

SLOW = {"_python_layout_holds": lambda: False, "_numpy_gauss_offset": lambda kind: None}


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state()
    generator = numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(generator)
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(params=["fast", "official"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RngState:
    numpy.random.rand()
    if request.param == "official":
        for name, replacement in SLOW.items():
            monkeypatch.setattr(rng, name, replacement)
        monkeypatch.setattr(torch_rng, "_offset", lambda: None)
    return RngState()


def draw() -> list[Any]:
    """Draw from every stream, an odd number of normals from each, because the spare one is part of the state."""
    return [
        random.random(),
        [random.gauss(0, 1) for _ in range(3)],
        numpy.random.rand(3).tolist(),
        [float(numpy.random.standard_normal()) for _ in range(3)],
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        float(torch.randn(())),
    ]


def captured(streams: RngState) -> bytes:
    return b"".join(streams.capture())


def streams_of(data: bytes) -> dict[str, Any]:
    """Return the captured streams in the form of the libraries' own functions."""
    python, python_gauss, numpy_words, numpy_gauss, host, _ = _split(data)
    return {
        "python": rng.python_state(python, python_gauss),
        "numpy": numpy_tuple(numpy_words, numpy_gauss) if numpy_words else None,
        "torch": _torch_state(host),
    }


def numpy_tuple(data: bytes, gauss: bytes) -> tuple[Any, ...] | None:
    """Return the older form of ``numpy.random.get_state``; None: it is not a Mersenne Twister."""
    state = rng._numpy_state(data, gauss)
    if state["bit_generator"] != "MT19937":
        return None
    inner = state["state"]
    return ("MT19937", inner["key"].copy(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"]))


def said(streams: RngState) -> str:
    """Return the captured streams in the libraries' form: live memory also holds bytes that no number depends on."""
    with numpy.printoptions(threshold=sys.maxsize):
        found = streams_of(captured(streams))
        return repr(found | {"torch": found["torch"].tolist()})


@pytest.mark.parametrize("before", range(0, 4))
def test_round_trip(streams: RngState, before: int) -> None:
    seed(before)
    for _ in range(before):
        draw()
    data = captured(streams)
    expected = [draw() for _ in range(3)]
    seed(99)
    assert streams.restore(data) == []
    assert [draw() for _ in range(3)] == expected


def test_captured_again_it_is_the_same(streams: RngState) -> None:
    seed(1)
    draw()
    taken, data = captured(streams), said(streams)
    draw()
    assert said(streams) != data
    streams.restore(taken)
    assert said(streams) == data


def test_the_fast_way_is_used_here_and_says_what_the_official_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy.random.rand()
    fast = rng.HostStreams()
    fast.capture()
    assert fast._python._live is not None
    assert fast._numpy is not None and fast._numpy._words is not None
    for name, replacement in SLOW.items():
        monkeypatch.setattr(rng, name, replacement)
    official = rng.HostStreams()
    official.capture()
    assert official._python._live is None
    assert official._numpy is not None and official._numpy._words is None
    for number in range(5):
        seed(number)
        for _ in range(number):
            draw()
        assert fast._python.capture()[0] == official._python.capture()[0]
        assert fast._python.capture()[1] == official._python.capture()[1]
        expected = numpy.random.get_state(legacy=True)
        words, gauss = fast._numpy.capture()
        assert bytes(words)[: 624 * 4] == expected[1].astype("<u4").tobytes()
        assert int.from_bytes(bytes(words)[624 * 4 :], "little") == expected[2]
        assert rng._unpack_gauss(gauss) == (expected[4] if expected[3] else None)


@pytest.mark.parametrize(
    ("saved", "there"), [("PCG64", "MT19937"), ("Philox", "MT19937"), ("SFC64", "MT19937"), ("MT19937", "PCG64")]
)
def test_numpy_with_another_bit_generator(streams: RngState, saved: str, there: str) -> None:
    seed(3)
    captured(streams)
    numpy.random.set_bit_generator(getattr(numpy.random, saved)(5))
    numpy.random.rand(7)
    data = captured(streams)
    expected = numpy.random.rand(5).tolist()
    numpy.random.set_bit_generator(getattr(numpy.random, there)(1))
    assert streams.restore(data) == []
    assert numpy.random.rand(5).tolist() == expected


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    streams = RngState()
    data = captured(streams)
    monkeypatch.undo()
    numpy.random.seed(8)
    expected = numpy.random.rand()
    numpy.random.seed(8)
    streams.restore(data)
    assert numpy.random.rand() == expected, "numpy's stream is left alone"


def test_another_process_layout_is_noticed() -> None:
    class Other(random.Random):
        pass

    assert rng._numpy_gauss_offset(type(numpy.random.RandomState(0))) is not None
    assert rng._numpy_gauss_offset(Other) is None


@pytest.mark.parametrize(
    "data", [b"", b"RNG", b"XXXX" + bytes(24), b"RNG\1" + bytes(24), b"RNG\1" + b"\xff" * 24, b"RNG\1" + bytes(25)]
)
def test_garbage(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="random streams"):
        RngState().restore(data)


class TestDevice:
    """The CUDA generator, with a stand-in for torch.cuda."""

    class Generator:
        def __init__(self) -> None:
            self.state = torch.arange(16, dtype=torch.uint8)

        def get_state(self) -> Any:
            return self.state.clone()

        def set_state(self, state: Any) -> None:
            self.state = state

    @pytest.fixture
    def generators(self, monkeypatch: pytest.MonkeyPatch) -> list[Generator]:
        made = [self.Generator(), self.Generator()]
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "current_device", lambda: 1)
        monkeypatch.setattr(cuda, "default_generators", made)
        return made

    def test_the_current_one_is_captured(self, generators: list[Generator]) -> None:
        generators[1].state += 5
        data = captured(RngState())
        generators[1].state = torch.zeros(16, dtype=torch.uint8)
        assert RngState().restore(data) == []
        assert generators[1].state.tolist() == list(range(5, 21))
        assert generators[0].state.tolist() == list(range(16))

    def test_the_model_may_be_on_another_one(
        self, generators: list[Generator], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A program may name its device everywhere, and never call ``set_device``."""
        monkeypatch.setattr(capture, "devices_of", lambda tensors: (torch.device("cuda", 0),))
        streams = capture.LocalCapture(torch.nn.Linear(1, 1), runtimes=())._streams
        generators[0].state += 5
        data = captured(streams)
        generators[0].state = torch.zeros(16, dtype=torch.uint8)
        assert streams.restore(data) == []
        assert [generator.state[0].item() for generator in generators] == [5, 0]

    def test_of_a_process_with_several_devices_each(self, generators: list[Generator]) -> None:
        streams = RngState([torch.device("cuda", 0), torch.device("cuda", 1)])
        generators[1].state += 5
        data = captured(streams)
        for generator in generators:
            generator.state = torch.zeros(16, dtype=torch.uint8)
        assert streams.restore(data) == []
        assert [generator.state[0].item() for generator in generators] == [0, 5]
        assert "not those of 1 devices" in RngState().restore(data)[0]

    def test_a_job_without_the_device_says_so(
        self, generators: list[Generator], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = captured(RngState())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in RngState().restore(data)[0]


class TestTorchMemory:
    """Torch's stream is read directly from memory."""

    def test_it_is_used_here(self) -> None:
        assert RngState()._live is not None

    @pytest.mark.parametrize("number", range(6))
    def test_it_says_what_torch_says(self, number: int) -> None:
        seed(number)
        for _ in range(number):
            draw()
            torch.randn((), dtype=torch.float64)
        state = streams_of(captured(RngState()))["torch"]
        assert torch.equal(state, torch.get_rng_state())

    def test_one_way_reads_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A page of a torch whose memory layout is known is restored by one whose layout is not, and vice versa."""
        fast = RngState()
        monkeypatch.setattr(torch_rng, "_offset", lambda: None)
        official = RngState()
        assert official._live is None
        for writer, reader in ((fast, official), (official, fast)):
            seed(5)
            draw()
            data = captured(writer)
            expected = draw()
            seed(99)
            reader.restore(data)
            assert draw() == expected

    def test_another_layout_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch_rng._offset.cache_clear()
        monkeypatch.setattr(torch_rng, "_LIVE", struct.Struct("<Qi?3xI624I12xf?3xd?7x"))
        assert torch_rng._offset() is None
        torch_rng._offset.cache_clear()
