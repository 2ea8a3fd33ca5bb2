"""Saves and restores ``extra_state``: objects that the user wants restored besides model, optimizer and schedule.

There are three kinds of objects:

* an object with ``state_dict()`` and ``load_state_dict()``, or a random generator of torch or numpy, belongs to one
  rank and is captured with each update;
* such an object with the attribute ``ttp_constant = True`` seldom changes, and not with the updates, so its state is
  read only when a checkpoint is written;
* an ``nn.Module`` (an average of the weights) is large and equal on every replica, and is read in place at save time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from ttp.adapters.torch.local_state.generators import with_state_dict
from ttp.adapters.torch.local_state.large_arrays import LargeArrays
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.names import first_of, loads_itself, module_tensors
from ttp.adapters.versions import TORCHDATA, require
from ttp.errors import CheckpointError, ToldAs, UsageError
from ttp.processor.local_state.pages import Kept
from ttp.store.encoding import EncodingError, decode, encode
from ttp.store.repeated_encoding import RepeatedEncoder

_LISTED_MAX = 3
SINGLE = "extra_state"
"""The name of an object that was given without one."""


class ExtraState:
    """Holds the user's objects by name and kind, and reads and restores their states.

    Args:
        given: one object or random generator, or a dict of names to such; None: there are none.

    Raises:
        UsageError: an object lacks ``state_dict`` or ``load_state_dict``, or its state cannot be stored; the text
            names the object and the path in its state.
    """

    def __init__(self, given: Any = None) -> None:
        named = _named(given)
        self.modules: dict[str, nn.Module] = {n: o for n, o in named.items() if isinstance(o, nn.Module)}
        """The objects that are modules, by name: replicated state, whose tensors are saved with the shard."""
        self._made = {name: {*module_tensors(module)} for name, module in self.modules.items()}
        others = {n: o for n, o in named.items() if n not in self.modules}
        loaders = {n: o for n, o in others.items() if type(o).__module__.startswith("torchdata.")}
        self._late = [name for name, loader in loaders.items() if _late_epoch(loader, [*named.values()])]
        if loaders:
            require("torchdata", "wrap_optimizer", TORCHDATA, extra="torchdata")
        self._constant = {n: o for n, o in others.items() if getattr(o, "ttp_constant", False) is True}
        self._changing = {n: o for n, o in others.items() if n not in self._constant}
        self.completed = {n for n, o in others.items() if getattr(o, "ttp_completes_itself", False) is True}
        """Names of objects of ttp that lack nothing on a rank that died in its update, or take it from other ranks."""
        for name, value in {**self._changing, **self._constant}.items():
            _encoded(name, value, on_host=name in self._constant)
        self._encoders = {name: RepeatedEncoder(path_of(name)) for name in self._changing}
        self._arrays = {name: LargeArrays() for name in self._changing}

    def notes(self) -> list[str]:
        """Return warnings about these objects for jobs with several ranks."""
        late = [
            f"{path_of(name)} goes to its saved position in ttp.restore(), in the order of the epoch that its sampler "
            "has then: in the middle of an epoch a later set_epoch() is too late. Give the sampler's epoch as "
            "extra_state too, before the loader (docs/frameworks.md, data loaders)"
            for name in self._late
        ]
        own = [
            f"{path_of(name)} holds statistics of BatchNorm ({layer}), which differ between ranks: after a restore "
            "every rank has those of the rank that saved. To resume bit for bit, use SyncBatchNorm, or let the average "
            "copy the model's buffers at each update"
            for name, module in self.modules.items()
            if (layer := _own_statistics(module)) is not None
        ]
        bare = [
            f"{path_of(name)} is a module without parameters. Modules count as equal on all ranks: after a restore "
            "every rank has what the state_dict() of one rank held. If each rank collects its own, as metrics do, give "
            "an object that is no nn.Module, whose state_dict() and load_state_dict() call those of the module"
            for name, module in self.modules.items()
            if next(module.parameters(), None) is None
        ]
        return late + own + bare

    @property
    def objects(self) -> tuple[Any, ...]:
        """All given objects."""
        return (*self.modules.values(), *self._changing.values(), *self._constant.values())

    def tensors_in_place(self) -> dict[str, Tensor]:
        """Return the tensors of the modules by name, without statistics of BatchNorm, which ``notes`` tells of."""
        return {
            ".".join(filter(None, (path_of(name), prefix, key))): tensor
            for name, module in self.modules.items()
            for prefix, each in module.named_modules()
            if not isinstance(each, _NormBase)
            for key, tensor in (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
            if not is_distributed(tensor) and key not in each._non_persistent_buffers_set
        }

    def refuse_late(self) -> None:
        """Refuse a module that has made tensors since it was given, unless it has loading code of its own.

        Raises:
            UsageError: there is such a module. A restarted program has not made the tensors when it restores.
        """
        for name, module in self.modules.items():
            made = module_tensors(module).keys() - self._made[name]
            if late := sorted(each for each in made if not _may_be_loaded(module, each)):
                raise UsageError(
                    f"{first_of([f'{path_of(name)}.{each}' for each in late], _LISTED_MAX)} were made after "
                    "wrap_optimizer(): a restarted program has not made them yet, and could not load them. Make them "
                    "before wrap_optimizer()"
                )

    def object(self, name: str) -> Any:
        """Return the object of this name, which is one of ``changing``."""
        return self._changing[name]

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of the objects that are captured with each update."""
        return tuple(self._changing)

    def capture(self, name: str) -> tuple[bytes, Sequence[Kept]]:
        """Read and encode the state of one of the ``changing`` objects.

        Args:
            name: the name of the object.

        Returns:
            The encoded state without its large arrays, and these arrays as live memory with stamps.

        Raises:
            EncodingError: the state cannot be stored.
        """
        encoder = self._encoders[name]
        encoded = encoder.encode(self._changing[name].state_dict())
        return encoded, self._arrays[name].look_at(encoder.apart)

    def capture_constant(self) -> dict[str, bytes]:
        """Return the encoded states of the constant objects, at save time. May be called on any thread.

        Raises:
            UsageError: a state cannot be stored.
        """
        return {name: _encoded(name, value) for name, value in self._constant.items()}

    def restore(self, saved: Mapping[str, bytes]) -> list[str]:
        """Restore every object that is not a module. Returns notes for the log on objects that only one side has.

        Raises:
            CheckpointError: a saved state cannot be read.
            OtherModelError: its object does not accept it.
        """
        objects = {**self._changing, **self._constant}
        states = {name: _decoded(name, data) for name, data in saved.items() if name in objects}
        for name, state in states.items():
            hand_to(f"{path_of(name)}.load_state_dict()", functools.partial(self._load, name), state)
        notes = [f"{path_of(name)} was not saved: it keeps its initial state" for name in objects if name not in saved]
        return notes + [f"{path_of(name)} was saved, and this job has none" for name in saved if name not in objects]

    def _load(self, name: str, state: Any) -> None:
        if name in self._constant:
            self._constant[name].load_state_dict(state)
            return
        thing = self._changing[name]
        thing.load_state_dict(state)
        if getattr(thing, "_iter_for_state_dict", False) is True:  # a Loader of torchdata.nodes: it would go on with
            thing._it, thing._iter_for_state_dict = None, False  # the iterator that an earlier state_dict() has made
        # A data loader makes its iterator here and draws, before random streams are restored.
        thing.state_dict()


def _may_be_loaded(module: nn.Module, late: str) -> bool:
    """Return whether the module, or one inside of it that holds this tensor, has loading code that may make it."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    path = late.split(".")[:-1]
    holders = (module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1))
    return any(loads_itself(each) or each._load_state_dict_pre_hooks for each in holders)


def _own_statistics(module: nn.Module) -> str | None:
    """Return the name of the first layer whose statistics each rank computes from its own batches; None: none."""
    kept = ((name, each) for name, each in module.named_modules() if isinstance(each, _NormBase))
    own = ((name, each) for name, each in kept if each.track_running_stats and not isinstance(each, nn.SyncBatchNorm))
    return next((name for name, _ in own), None)


def by_name(given: Any) -> dict[str, Any]:
    """Return the objects that were given as ``extra_state``, by name."""
    return {} if given is None else dict(given) if isinstance(given, Mapping) else {SINGLE: given}


def _named(given: Any) -> dict[str, Any]:
    named = {name: with_state_dict(value) for name, value in by_name(given).items()}
    for name, value in named.items():
        if not isinstance(name, str):
            raise UsageError(f"extra_state has the key {name!r}; its keys are names, so use strings")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(
                    f"{path_of(name)} is a {type(value).__name__} without {method}(); give it state_dict() and "
                    "load_state_dict(), as torch's own objects have"
                )
    return named


def path_of(name: str) -> str:
    """Return how a message names the object with this name."""
    return SINGLE if name == SINGLE else f"{SINGLE}[{name!r}]"


def _refuse_devices(name: str, state: Any) -> None:
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise UsageError(
                f"{path_of(name)} holds a tensor on {leaf.device}. The state of an object with ttp_constant is read "
                "when a checkpoint is written, and the device may hang then: keep it on the CPU"
            )


def _late_epoch(loader: Any, restored: Sequence[Any]) -> bool:
    """Return whether a loader's sampler has to know its epoch, and no object that is restored before it has it."""
    before = itertools.takewhile(lambda each: each is not loader, restored)
    sampler = getattr(loader, "sampler", None)
    held = (value for each in before if hasattr(each, "__dict__") for value in vars(each).values())
    return hasattr(sampler, "set_epoch") and not any(value is sampler for value in held)


def _encoded(name: str, value: Any, *, on_host: bool = False) -> bytes:
    """Encode the state of an object; with ``on_host`` a tensor on a device is refused."""
    try:
        state = value.state_dict()
        if on_host:
            _refuse_devices(name, state)
        return encode(state, f"{path_of(name)}.state_dict()")
    except UsageError:
        raise
    except EncodingError as problem:
        raise UsageError(f"this state cannot be stored: {problem}") from problem
    except Exception as problem:
        raise UsageError(f"{path_of(name)}.state_dict() failed: {type(problem).__name__}: {problem}") from problem


def _decoded(name: str, data: bytes) -> Any:
    with ToldAs(CheckpointError, f"the saved state of {path_of(name)} cannot be read", EncodingError):
        return decode(data)
