"""A device made of host memory that behaves as badly as a real one may.

Work runs in the order of its stream. Between streams it runs in the worst order: nothing runs before an event is
queried, and then one kind of stream runs as far as it can before the other (``order``). A stream may hang for ever
while others go on. The target of a copy to the host is garbage until the copy has run; the result of an operation is
garbage until the operation has run. A torch operation on device memory is work of the stream that is current in its
thread, whichever module calls it: ``contiguous()`` and ``clone()`` allocate, ``item()`` and ``equal()`` wait. A single
number that it takes from the host is read when the operation is queued. The tensors that it writes to are memory of the
device, whichever code made them: torch makes counters and found infinities there by itself. ``fake_python`` does what
Python calls do that are no operations, such as ``cpu()``.

A *sin* is an action that a real device would not forgive. It is raised as an exception, and kept in ``FakeDevice.sins``
in case the exception is swallowed:

* memory of the device, or pinned memory, is allocated after ``seal()``;
* a thread in ``no_waiting()`` waits for the device;
* work is queued while a CUDA graph is captured (``capturing``);
* a thread waits for a stream that hangs, or launches a kernel for the first time while one hangs: the kernel is loaded
  lazily, and the call would never return;
* a kernel is launched on a side stream while a stream hangs: it may never start. Copies of dense memory do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.adapters.torch.fake_python import Saying

POISON = 0xEE
TRAINING, SIDE = "training first", "side first"

_copy: Any = torch.ops.aten.copy_.default
_clone: Any = torch.ops.aten.clone.default
_item: Any = torch.ops.aten._local_scalar_dense.default
_foreach_copy: Any = torch.ops.aten._foreach_copy_.default
_indexing: Any = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default
_unknown_shape: Any = torch.Tag.dynamic_output_shape


class Sin(AssertionError):  # noqa: N818 - not an error of the stand-in, but of what it watches
    """The code did something that fails on a real device."""


@dataclass(eq=False)
class FakeEvent:
    device: FakeDevice
    done: bool = False

    def query(self) -> bool:
        self.device.check()
        self.device.pump()
        return self.done

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.0002)


@dataclass(eq=False)
class FakeStream:
    side: bool = False
    queue: deque[Any] = field(default_factory=deque)  # work, a FakeEvent to be marked, ("wait", event), "hang"

    def step(self) -> bool:
        """Run the next work of the queue. Returns False if it cannot run or the queue is empty."""
        if not self.queue or self.hangs:
            return False
        head = self.queue[0]
        if isinstance(head, tuple) and not head[1].done:
            return False
        self.queue.popleft()
        if isinstance(head, FakeEvent):
            head.done = True
        elif not isinstance(head, tuple):
            head()
        return True

    @property
    def hangs(self) -> bool:
        return bool(self.queue) and isinstance(self.queue[0], str)


class FakeDevice:
    """A device with memory and streams. ``order`` is the stream that runs first; ``beside`` is a second device."""

    def __init__(self, order: str = TRAINING, beside: FakeDevice | None = None) -> None:
        self.order, self.name = order, torch.device("cuda", 0 if beside is None else 1)
        self.moving = threading.Event()
        self.moving.set()
        self.broken = False
        self.capturing = False
        self.sins: list[str] = []
        self.allocated = 0
        self.waits: Counter[int] = Counter()  # by thread: how often it waited for the device
        self.training = FakeStream()
        self._streams = [self.training]
        self._memory: dict[int, Any] = {}  # storages; referred to, so that their addresses stay theirs
        self._pinned: dict[int, Any] = {} if beside is None else beside._pinned
        self._loaded: set[Any] = set()
        self._sealed = False
        self._patient: set[int] = set()
        self._may_hang: set[int] = set()
        self._lock = threading.RLock()
        self._here = threading.local()

    # ------------------------------------------------------------------------------------------------------ for tests

    def put(self, tensor: Any) -> Any:
        """Move the tensor to the memory of the device."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._memory[storage.data_ptr()] = storage
        return tensor

    def launch(self, work: Callable[[], Any]) -> None:
        """Queue ``work``, which runs on the host, on the stream of this thread."""
        self._queue(work)

    def hang(self) -> None:
        """Work that is queued on the training stream from now on never runs."""
        self._queue("hang", self.training)

    def release(self) -> None:
        """Abort the hanging collective, so that the work after it runs."""
        with self._lock:
            for stream in self._streams:
                stream.queue = deque(task for task in stream.queue if not isinstance(task, str))

    def run(self) -> None:
        """Run all work that can run."""
        self.pump()

    def seal(self) -> None:
        """Forbid allocations of memory from now on."""
        self._sealed = True

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Forbid this thread to wait for the device."""
        self._patient.add(threading.get_ident())
        try:
            yield
        finally:
            self._patient.discard(threading.get_ident())

    @contextlib.contextmanager
    def may_hang(self) -> Iterator[None]:
        """Let this thread, as a training thread, hang until ``release`` if it waits for work that hangs."""
        self._may_hang.add(threading.get_ident())
        try:
            yield
        finally:
            self._may_hang.discard(threading.get_ident())

    # ------------------------------------------------------------------------------------------------- for the runtime

    @property
    def current(self) -> FakeStream:
        return getattr(self._here, "stream", self.training)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream(side=True))
        return self._streams[-1]

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def allocate(self, size: int, *, pinned: bool = False) -> Tensor:
        if self._sealed:
            self.sin(f"{size} bytes {'of pinned memory' if pinned else 'on the device'} are set aside after the start")
        memory = torch.full((size,), POISON, dtype=torch.uint8, device="cpu")
        self.allocated += 1
        owned = self._pinned if pinned else self._memory
        if size:
            owned[memory.untyped_storage().data_ptr()] = memory.untyped_storage()
        return memory

    def has(self, tensor: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def event(self, stream: FakeStream) -> FakeEvent:
        self.check()
        event = FakeEvent(self)
        self._queue(event, stream)
        return event

    def wait(self, event: Any, stream: FakeStream) -> None:
        self._queue(("wait", event), stream)

    def pump(self) -> None:
        """Run the work that can run, in the least favourable order."""
        below: Any = torch._C._AutoDispatchBelowADInplaceOrView()  # versions were counted when it was queued
        with self._lock, _disable_current_modes(), below:
            first, then = sorted((False, True), reverse=self.order == SIDE)
            progress = self.moving.is_set()
            while progress:
                progress = self._step(first) or self._step(then)

    def _step(self, side: bool) -> bool:
        stepped = [stream.step() for stream in self._streams if stream.side is side]
        return any(stepped)

    def sin(self, text: str) -> NoReturn:
        self.sins.append(text)
        raise Sin(text)

    def _queue(self, task: Any, stream: FakeStream | None = None) -> None:
        if not (self.capturing and self.captured(task)):
            with self._lock:
                (stream or self.current).queue.append(task)

    def captured(self, _task: Any) -> bool:
        """Make work a part of the graph that is captured. Returns False if it is not, and is to run."""
        self.sin("it becomes part of a CUDA graph")

    def left(self, tensor: Any, what: object) -> Any:
        """Wait for the device, and return a copy of the tensor on the host."""
        self._wait(what)
        with _disable_current_modes():
            return tensor.detach().clone()

    def made(self, tensor: Any) -> Any:
        """Note that the program has set memory aside, and return a tensor that is on the device."""
        if not self.has(tensor):
            if self._sealed:
                self.sin(f"{tensor.nbytes} bytes are set aside on the device after the start")
            self.allocated += 1
        return self.put(tensor)

    # -------------------------------------------------------------------------------------------- operations of torch

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what torch does with memory of this device."""
        self.check()
        if func is _item:
            self._wait(func)
            return func(*args, **kwargs)
        self._load(func, args)
        if func in (_copy, _foreach_copy):
            return self._copied(func, args, kwargs)
        if _depends_on_values(func, args):
            self._wait(func)
        written = [leaf for leaf in tree_leaves(_written(func, args, kwargs)) if isinstance(leaf, Tensor)]
        for leaf in written:
            self.put(leaf)
        result = args[0] if func._schema.returns else None
        args, kwargs = self._taken(args, kwargs)
        if written:
            self._queue(lambda: func(*args, **kwargs))
            return result
        if not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            self._wait(func)
            return func(*args, **kwargs)
        return self._computed(func, args, kwargs)

    def _taken(self, args: Any, kwargs: Any) -> Any:
        """Copy the arguments that are on the host, as they are now."""
        flat, form = tree_flatten((args, kwargs))
        with _disable_current_modes():
            return tree_unflatten([t.clone() if isinstance(t, Tensor) and not self.has(t) else t for t in flat], form)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        to, source = (args[0], args[1]) if func is _foreach_copy else ([args[0]], [args[1]])
        crossing = any(self.has(one) is not self.has(other) for one, other in zip(to, source, strict=True))
        plain = all(self._straight(one, other) for one, other in zip(to, source, strict=True))
        pinned = all(self.has(t) or t.untyped_storage().data_ptr() in self._pinned for t in (*to, *source))
        waits = crossing and not (pinned and kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        if crossing and not plain:
            self.sin("a copy between device and host that is not straight needs memory of the device")
        with _disable_current_modes():
            for one in to:
                if not self.has(one):
                    one.view(torch.uint8).fill_(POISON)  # it arrives late
        self._queue(lambda: func(*args, **kwargs))
        if waits:
            self._wait(func)
        return None if func is _foreach_copy else args[0]

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a result that has memory at once, and its content when the work has run."""
        with _disable_current_modes():
            tried = args
            if "batch_norm" in str(func):  # it writes to the statistics, which its schema does not say
                tried = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in args]
            results = func(*tried, **kwargs)
            fresh = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and not self.has(leaf)]
            for leaf in fresh:
                if self._sealed:
                    self.sin(f"{func} sets {leaf.nbytes} bytes aside on the device after the start")
                self.allocated += 1
                self.put(leaf).untyped_storage().fill_(POISON)

            def work() -> None:
                for leaf, content in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(leaf, Tensor):
                        leaf.copy_(content)

        self._queue(work)
        return results

    def _load(self, func: Any, args: Any) -> None:
        """Load the kernel at its first launch. Copies without conversion need no kernel."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if func in (_copy, _clone) and self._straight(args[0], args[1] if func is _copy else args[0]):
            return
        kernel = (str(func), *sorted({str(t.dtype) for t in tensors}), all(t.is_contiguous() for t in tensors))
        if self.current.side and any(stream.hangs for stream in self._streams):
            self.sin(f"{kernel} may never start beside kernels that never end")
        if kernel not in self._loaded:
            self.pump()
            if any(stream.hangs for stream in self._streams):
                self.sin(f"{kernel} is launched for the first time behind a kernel that never ends")
            self._loaded.add(kernel)

    @staticmethod
    def _straight(one: Tensor, other: Tensor) -> bool:
        return one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()

    def _wait(self, what: object) -> None:
        self.waits[threading.get_ident()] += 1
        if threading.get_ident() in self._patient:
            self.sin(f"{what} waits for the device")
        stream = self.current
        self.pump()
        while stream.queue and threading.get_ident() in self._may_hang:
            time.sleep(0.0002)
            self.pump()
        if stream.queue:
            self.sin(f"{what} waits for ever")


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    schema = func._schema.arguments
    named = [(a, args[n] if n < len(args) else kwargs.get(a.name)) for n, a in enumerate(schema)]
    return [value for a, value in named if a.alias_info is not None and a.alias_info.is_write]


def _depends_on_values(func: Any, args: Any) -> bool:
    """Return whether the host has to know values on the device to tell the shape of the result, or what to write."""
    if func in _indexing:
        return any(isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(args[1]))
    return _unknown_shape in func.tags


class Watching(TorchDispatchMode):
    """While it is active, the devices run what this thread does with their memory."""

    def __init__(self, *devices: FakeDevice) -> None:
        super().__init__()
        self._devices, self._saying = devices, Saying(devices)

    def __enter__(self) -> Any:
        self._saying.__enter__()
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._saying.__exit__(*problem)

    def dispatch(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, form = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        owner = next((d for d in self._devices for t in tensors if not t.is_meta and d.has(t)), None)
        args, kwargs = tree_unflatten(flat, form)
        if owner is None or func.is_view:
            return func(*args, **kwargs)
        return owner.operate(func, args, kwargs)


# Set here, because torch wraps what a class body has, and then imports its compiler for seconds.
Watching.__torch_dispatch__ = Watching.dispatch  # type: ignore[assignment,method-assign] # on purpose: see above
