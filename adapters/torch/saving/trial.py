"""Checks at the start of training that the state can be saved, so that no save is refused when a rank fails.

The state is checked twice, without writing anything: when the objects are wrapped, and after their first update, when
the optimizer has its state and the model its final form. Of a tensor only kind, layout and device are checked, not its
bytes; plain values are encoded. The second check runs on a thread of its own beside the next forward pass. Its errors
are raised where the second update would begin, so at the same place on every rank.
"""

from __future__ import annotations

import atexit
import logging
import resource
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.saving.checkpoint import objection
from ttp.adapters.torch.saving.flatten_state import PLAIN, StateValue, dump, leaves
from ttp.adapters.torch.sharding.dtensor_chunks import local
from ttp.adapters.torch.sharding.names import ModelNames, first_of, parameters_of
from ttp.errors import ConfigError, UsageError

_log = logging.getLogger("ttp.adapters.torch")

DEVICES = ("cpu", "cuda")
"""Types of devices that a save can read from."""
_PATIENCE_S = 60.0
"""Seconds that the second update waits for the result of the second check, which takes milliseconds."""
_END_S = 5.0  # that the end of the process waits for a check: it would abort if a thread were still in torch's code
_LISTED_MAX = 4
_NOT_SAVED = "%s is not saved, because it has no form on disk: a restarted program has to make it again"
_UNSCHEDULED = (
    "an LR scheduler changes this optimizer, and wrap_optimizer() was given none: a resumed job begins the schedule "
    "anew. Make the scheduler first, and give it as scheduler="
)
_EARLIER = (
    "the optimizer holds the state of earlier updates, which ttp has not restored: versions are counted from here. If "
    "the loop's steps continue from a checkpoint of the program's own, restore() returns too small a number after a "
    "failure: docs/support.md (checkpoints of the program's own) says how to add the step of that checkpoint"
)
_MADE_LATE = (
    "%s were added to the model after wrap_optimizer(). ttp.restore() refuses a restarted program whose model lacks "
    "them or has other shapes: make all layers before wrap_optimizer(), in their last size, and later only param groups"
)
_CAST = (
    "the dtype of %s has changed since wrap_optimizer(). If that was after ttp.restore(), a restarted program will be "
    "refused there, as its model has not the dtypes of the checkpoint yet. Cast the model first, then make the "
    "optimizer, then call wrap_optimizer()"
)
_LIMITED = (
    "no file of this process may be larger than %s bytes (RLIMIT_FSIZE, `ulimit -f`), and this rank may have to write "
    "%s bytes of training state to one file: such a save fails with errno 27. Raise the limit where the job is launched"
)
_SETTINGS = ("optim", "param_groups")

State = Mapping[str, Any]
"""A state in the form that ``checkpoint_state`` returns."""


def refusal(state: State, model: nn.Module) -> str:
    """Return why ``state`` could not be saved, and what to do; an empty string if it could be saved.

    Args:
        state: all state that this rank may have to write.
        model: the model; all of its buffers are captured after every update, non-persistent ones too.
    """
    found = [*_wrong_device(state, model), *_wrong_tensors(state), *_wrong_values(state), *_wrong_names(state)]
    more = f"; and {len(found) - _LISTED_MAX} more like it" if len(found) > _LISTED_MAX else ""
    return f"this training state could not be saved: {'; '.join(found[:_LISTED_MAX])}{more}" if found else ""


def try_before_training(state: State, model: nn.Module, names: ModelNames, no_memory: Sequence[str]) -> None:
    """Make the first check, before training. Logs the values that are not saved and that do not prevent a save.

    Args:
        state: see ``refusal``.
        model: see ``refusal``.
        names: names of the model.
        no_memory: names of buffers that cannot be captured.

    Raises:
        ConfigError: a save would not be possible.
    """
    if why := refusal(state, model):
        raise ConfigError(why)
    lost = [name for name in no_memory if names.canonical(name) not in names.buffers]
    more = f" (and {len(lost) - 1} more like it)" if len(lost) > 1 else ""  # each layer may have one
    for what in (*left_out(state), *(f"the buffer {name}{more}" for name in lost[:1])):
        _log.warning(_NOT_SAVED, what)


def left_out(state: State) -> list[str]:
    """Return the names of param group settings that have no form on disk. A restarted program makes them again."""
    return [leaf.key for leaf in _values(state) if leaf.path[:2] == _SETTINGS and not _storable(leaf.value)]


class Trial:
    """The second check, after the first update. All methods are for the training thread.

    Args:
        optimizers: the optimizers whose state is saved.
        model: the registered model.
        names: names of the model.
        make_state: returns the state as a save would read it; called on another thread.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], model: nn.Module, names: ModelNames, make_state: Callable[[], State]
    ) -> None:
        self._optimizers, self._model, self._names, self._make_state = tuple(optimizers), model, names, make_state
        self.problems: Callable[[], list[str]] = lambda: []
        """Returns other problems that show after the first update, in sentences; called on the training thread."""
        self.scheduled = True
        """False if no scheduler, and no object that may hold one, is saved."""
        self.fresh: Callable[[], bool] = lambda: False
        """Returns whether no update has been made or restored."""
        self.begins_fresh: Callable[[], object] = lambda: None
        """Called before the first update if it is the first of all."""
        self.saved: Callable[[], Collection[str]] = self._all
        """Returns the names of the parameters in this rank's shards."""
        self.regrouped: Callable[[], object] = lambda: None
        """Called before an update whose optimizers have new param groups, or other parameters."""
        self.shards = 1
        """Number of shards that this rank holds; each of them is saved to a file of its own."""
        self.tell_size: Callable[[int], object] = lambda _: None
        """Called once after the first update, on another thread, with the bytes of a shard."""
        self._devices = _devices(model)
        fixed = names.buffers.keys() - names.of_any_shape
        self._shapes = {name: tuple(buffer.shape) for name, buffer in names.buffers.items() if name in fixed}
        self._dtypes = {name: parameter.dtype for name, parameter in names.parameters.items()}
        self._made = {id(parameter) for parameter in names.parameters.values()}
        self._groups = [*map(_first_and_count, self._optimizers)]
        self._found, self._said = "", set[str]()
        self.due = True
        """True if ``update_finished`` has to be called, because the next finished update starts a check."""
        self._thread: threading.Thread | None = None
        self._waits, self._checked = True, False

    def before_update(self) -> None:
        """Raise what the check has found, and look for a changed model and new param groups. Call before each update.

        Raises:
            UsageError: a save would not be possible, or would not contain the parameters that are trained.
        """
        if not self._checked:
            self._checked = True
            self._refuse_replaced()
            now = self._names.parameters
            if cast := [name for name, dtype in self._dtypes.items() if name in now and now[name].dtype != dtype]:
                _log.warning(_CAST, first_of(cast, _LISTED_MAX))
            if self.fresh():
                self.begins_fresh()
                if any(map(_has_state, self._optimizers)):
                    _log.warning(_EARLIER)
        for number, optimizer in enumerate(self._optimizers):
            if (found := _first_and_count(optimizer)) != self._groups[number]:
                self._groups[number], self.due = found, True
                self._refuse_unsaved()
                self._tell_late()
                self.regrouped()
        if self._thread is not None and (self._waits or not self._thread.is_alive()):
            self._finish(self._thread)

    def update_finished(self) -> None:
        """Start the check after the first update, and after the first update with new param groups."""
        if self.due and self._thread is None:
            self.due = False
            self._found = "; ".join(self.problems())
            if not self.scheduled and any(hasattr(each.step, "_wrapped_by_lr_sched") for each in self._optimizers):
                self.scheduled = True  # said once
                _log.warning(_UNSCHEDULED)
            self.start(self._try)

    def start(self, check: Callable[[], str], *, waits: bool = True) -> None:
        """Run a check on another thread, unless one runs; if it returns a text, the next update raises that.

        Args:
            check: returns what is wrong; empty: nothing is.
            waits: whether the next update waits for the check; if not, the first update after its end raises.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, args=(check,), name="ttp-trial", daemon=True)
            try:
                thread.start()
            except RuntimeError as problem:  # the next update must not wait for a thread that never began
                _log.warning("it is not checked whether this training state can be saved: %s", problem)
            else:
                self._waits, self._thread = waits, thread
                atexit.register(thread.join, _END_S)

    # ------------------------------------------------------------------------------------------------------- private

    def _all(self) -> set[str]:
        """Return the names of the parameters that the optimizers have now."""
        return set(map(self._names.of, parameters_of(*self._optimizers)))

    def _try(self) -> str:
        state = self._make_state()
        self._say(left_out(state))
        found = refusal(state, self._model) or "; ".join([*self._grown(), *self._made_late()])
        if not found:
            self._tell_sizes(_bytes(state) // self.shards)
        return found

    def _tell_sizes(self, size: int) -> None:
        """Warn if a shard of ``size`` bytes cannot be written to one file; tell what a checkpoint needs."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if resource.RLIM_INFINITY != limit < size:
            _log.warning(_LIMITED, limit, size)
        tell, self.tell_size = self.tell_size, lambda _: None
        tell(size)

    def _run(self, check: Callable[[], str]) -> None:
        try:
            found = check()
        except UsageError as problem:
            found = str(problem)
        except Exception:  # code of the program raised, or the state grew meanwhile: no reason to stop training
            _log.warning("the check whether this training state can be saved has failed", exc_info=True)
            return
        self._found = self._found or found

    def _finish(self, thread: threading.Thread) -> None:
        atexit.unregister(thread.join)
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            _log.warning("the check whether this training state can be saved has not ended after %g s", _PATIENCE_S)
        self._thread = None
        if self._found:
            raise UsageError(self._found)

    def _say(self, keys: Sequence[str]) -> None:
        for key in dict.fromkeys(key for key in keys if key not in self._said):
            self._said.add(key)
            _log.warning(_NOT_SAVED, key)

    def _refuse_replaced(self) -> None:
        """Refuse parameters that were replaced after the objects were wrapped and before training."""
        now = ModelNames(self._model, None).parameters
        trained = self._names.updated_by(*self._optimizers)
        if replaced := [name for name, parameter in trained.items() if now.get(name, parameter) is not parameter]:
            raise UsageError(
                f"{len(replaced)} parameters of the model ({', '.join(replaced[:_LISTED_MAX])}) were replaced after "
                "wrap_optimizer(), and the optimizer still updates the old ones. fully_shard() and "
                "FullyShardedDataParallel do that: shard the model first, then make the optimizer, then call "
                "wrap_optimizer()"
            )
        if self._devices != (devices := _devices(self._model)):
            raise UsageError(
                f"the model was moved from {_listed(self._devices)} to {_listed(devices)} after wrap_optimizer(): move "
                "the model first, then make the optimizer, then call wrap_optimizer()"
            )

    def _grown(self) -> Iterator[str]:
        """Yield messages about buffers whose shapes have changed, so that a restarted program could not load them."""
        now = {name: tuple(buffer.shape) for name, buffer in self._names.buffers.items()}
        for name, shape in self._shapes.items():
            if now.get(name, shape) != shape:
                yield (
                    f"the buffer {name} had the shape {shape} at wrap_optimizer() and has {now[name]} now: a restarted "
                    "program could not load it. Make it empty or None at first, give it its last shape before "
                    "wrap_optimizer(), or register it with persistent=False if it is a cache"
                )

    def _made_late(self) -> Iterator[str]:
        """Yield messages about buffers that training has made: a restarted program has none when it restores."""
        for name in self._names.made_late():
            yield (
                f"the buffer {name} was made after wrap_optimizer(): a restarted program would lose its value. "
                "Register it, as None if it has no value yet, before wrap_optimizer(), or register it with "
                "persistent=False if it is a cache"
            )

    def _tell_late(self) -> None:
        """Warn of parameters in the param groups that the model did not have when the objects were wrapped."""
        late = (self._names.of(p) for p in parameters_of(*self._optimizers) if id(p) not in self._made)
        if untold := [name for name in late if name not in self._said]:  # a loop may replace them again and again
            self._said.update(untold)
            _log.warning(_MADE_LATE, first_of(untold, _LISTED_MAX))

    def _refuse_unsaved(self) -> None:
        """Refuse a new param group whose parameters this job would not save."""
        for optimizer in self._optimizers:
            ModelNames(self._model, optimizer)  # raises if the optimizer has parameters that the model does not have
        given = self._all()
        if unsaved := sorted(given - set(self.saved())):
            raise UsageError(
                f"{', '.join(unsaved[:_LISTED_MAX])} were added to the optimizer after wrap_optimizer(), and in a job "
                "of several shards wrap_optimizer() settles which rank saves which parameters: add the parameters to "
                "the model, and the param group to the optimizer, before wrap_optimizer()"
            )


def _first_and_count(optimizer: Optimizer) -> tuple[int, int]:
    """Return the identity of an optimizer's first parameter, which tells that all were replaced, and its groups."""
    return id(next(iter(parameters_of(optimizer)), None)), len(optimizer.param_groups)


# ------------------------------------------------------------------------------------------------------------- checks


def _wrong_device(state: State, model: nn.Module) -> Iterator[str]:
    named = [(f"model.{name}", buffer) for name, buffer in model.named_buffers()]
    seen: set[str] = set()
    for key, tensor in (*((key, local(value)) for key, value in _tensors(state)), *named):
        kind = tensor.device.type
        if kind in DEVICES or key in seen:
            continue
        seen.add(key)
        cure = "ttp saves tensors on the CPU and on CUDA devices only"
        if kind == "meta":
            cure = "give it memory before wrap_optimizer(), for example by to_empty()"
        yield f"{key} is on the device {str(tensor.device)!r}: {cure}"


def _wrong_tensors(state: State) -> Iterator[str]:
    dtypes: set[torch.dtype] = set()
    for key, value in _tensors(state):
        tensor = local(value)
        if tensor.device.type not in DEVICES:
            continue
        if why := objection(key, tensor.detach()):
            yield why
        elif tensor.dtype not in dtypes:
            dtypes.add(tensor.dtype)
            if dump(torch.empty(0, dtype=tensor.dtype, device="cpu"), Tensor.cpu) is None:
                yield f"{key} has the dtype {tensor.dtype}, which torch {torch.__version__} does not load safely"


def _wrong_values(state: State) -> Iterator[str]:
    for leaf in _values(state):
        if leaf.path[:2] != _SETTINGS and not _storable(leaf.value):
            kind = type(leaf.value)
            yield (
                f"{leaf.key} is a {kind.__module__}.{kind.__qualname__}, which has no form on disk that is "
                "safe to load: keep tensors, numbers, strings, and lists and dicts (without tensors as keys) of them"
            )


def _wrong_names(state: State) -> Iterator[str]:
    count = Counter(leaf.key for leaf in leaves(state))
    for key in (key for key, number in count.items() if number > 1):
        yield f"two values are called {key} if the keys to them are joined by dots: give one of them another key"


def _tensors(state: State) -> Iterator[tuple[str, Tensor]]:
    return ((leaf.key, leaf.value) for leaf in leaves(state) if isinstance(leaf.value, Tensor))


def _bytes(state: State) -> int:
    """Return the bytes of all tensors, each once; they are the least that a save of this state writes."""
    parts = (local(tensor) for _, tensor in _tensors(state))
    return sum({(part.device, part.data_ptr(), part.nbytes): part.nbytes for part in parts}.values())


def _values(state: State) -> Iterator[StateValue]:
    return (leaf for leaf in leaves(state) if not isinstance(leaf.value, Tensor))


def _storable(value: Any) -> bool:
    """Return whether a value has a form on disk; the bytes of tensors in it do not matter."""
    plain = type(value) in PLAIN
    return plain or dump(value, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu")) is not None


def _has_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has made updates.

    Some make their state before, of zeros, masks and copies of the weights, or of a first value, with a count of 0
    then; and torch's ``get_state_dict()`` makes that of all optimizers, by a step that leaves zeros and is counted.
    """
    try:
        return any(_updated(*entry) for entry in optimizer.state.items() if isinstance(entry[1], Mapping))
    except Exception:  # not all dtypes and kinds of tensors can be compared with zero, and this is only for a warning
        return False


def _is_copy(tensor: Tensor, weights: Tensor) -> bool:
    return (tensor.dtype, tensor.device) == (weights.dtype, weights.device) and torch.equal(tensor, weights)


def _updated(owner: Any, state: Mapping[str, Any]) -> bool:
    tensors = {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
    weights = local(owner) if isinstance(owner, Tensor) else torch.empty(0, device="cpu")
    found = {name: bool(v.any()) for name, v in tensors.items() if v.dtype != torch.bool and not _is_copy(v, weights)}
    return found.pop("step", bool(state.get("step", 1))) and any(found.values())


def _devices(model: nn.Module) -> frozenset[str]:
    return frozenset(str(local(parameter).device) for parameter in model.parameters())


def _listed(devices: frozenset[str]) -> str:
    return ", ".join(sorted(devices)) or "nowhere"
