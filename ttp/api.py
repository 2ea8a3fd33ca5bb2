"""The public functions of ttp: decorate ``train()``, wrap the optimizer, restore, and mark steps and pauses."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from ttp import session
from ttp.config import RankEnv
from ttp.core.layout import Layout
from ttp.errors import EXIT_BAD_CONFIG, ConfigError, RefusedError, UsageError
from ttp.processor import continuing
from ttp.processor.last_words import asked_for, complain, leave_word
from ttp.update_function import is_suspended

log = logging.getLogger("ttp")

_SHARED_DIR = (
    "an earlier training of this process has used %s as well. Their checkpoints cannot be told apart: after a failure, "
    "one may go on from a checkpoint of the other. Give each training a save_dir of its own"
)

UNDO_WAYS = ("preimage", None)
"""Valid values of ``wrap_optimizer(undo=...)``."""

ACTIVITY_MAX = 80
"""Maximum length of an activity in characters; every heartbeat carries the activity."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@overload
def ttp_to_persist(func: F) -> F: ...
@overload
def ttp_to_persist(*, exit_on_bad_config: bool = ...) -> Callable[[F], F]: ...
def ttp_to_persist(func: F | None = None, *, exit_on_bad_config: bool = True) -> F | Callable[[F], F]:
    """Decorate ``train()`` so that its exceptions are reported and the process stays until the job is saved.

    Exit codes of the process: 75, a checkpoint was saved and the job should be started again; 70, nothing consistent
    could be saved; 64, the configuration is wrong or the program uses ttp wrongly. With 64 the finished steps have been
    saved, but a restart would not help. Without ``TTP_PORT`` the function runs as if undecorated.

    ``KeyboardInterrupt`` and ``sys.exit(0)`` behave as without ttp, but not after SIGTERM, when the job is saved. When
    ``train()`` returns, the decorator waits until it has returned on every rank, so that a rank which dies in its last
    step can still be saved from the others. A process that ``train()`` has forked is not the rank: if it leaves
    ``train()``, it behaves as without ttp.

    Args:
        func: the training function; ``@ttp_to_persist`` and ``@ttp_to_persist(...)`` both work.
        exit_on_bad_config: exit with code 64 on a ``ConfigError``, ``RefusedError`` or ``UsageError`` instead of
            raising it. Whatever the value, a ``UsageError`` or ``ConfigError`` that comes after this rank has joined
            the job ends all its ranks with 64.

    Returns:
        The decorated function, which takes and returns what ``func`` does.

    Raises:
        UsageError: ``func`` is not a function.
    """

    def decorate(train: F) -> F:
        if isinstance(train, staticmethod):  # written below this decorator: a plain function would become a method
            return staticmethod(decorate(train.__func__))  # type: ignore[return-value, arg-type]  # F is narrowed
        if not callable(train) or isinstance(train, type):
            todo = ": write @classmethod above @ttp.ttp_to_persist" if isinstance(train, classmethod) else ""
            raise UsageError(f"@ttp.ttp_to_persist decorates a function, and {train!r} is not one{todo}")
        continuing.prepare()

        @functools.wraps(train)
        def protected(*args: Any, **kwargs: Any) -> Any:
            return _run(train, args, kwargs, exit_on_bad_config)

        return protected  # type: ignore[return-value]

    return decorate if func is None else decorate(func)


def _run(train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], exit_on_bad_config: bool) -> Any:
    pid = os.getpid()
    try:
        while True:
            try:
                return _run_once(train, args, kwargs, exit_on_bad_config)
            except continuing.TrainAgain:
                pass
            # Nothing refers to the objects of the last train() any more.
            survivor = continuing.current()
            assert survivor is not None
            survivor.await_launcher()
    except (ConfigError, RefusedError) as problem:
        if not exit_on_bad_config or os.getpid() != pid:  # a forked child is not the rank
            raise
        _leave_misconfigured(problem)


def _run_once(
    train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], exit_on_bad_config: bool
) -> Any:
    current = session.current()
    if current.in_train:
        return train(*args, **kwargs)
    known, current.in_train, pid = current.adapter, True, os.getpid()
    try:
        if not current.enabled:
            return train(*args, **kwargs)
        if is_suspended(train):
            raise UsageError("ttp_to_persist: decorate a plain function, which may call asyncio.run(...) inside")
        if (survivor := continuing.current()) is not None:
            survivor.enter()
        return _protected(current, train, args, kwargs)
    except UsageError as problem:
        if not (exit_on_bad_config and current.enabled and os.getpid() == pid):
            raise
        _leave_misconfigured(problem, traceback.format_exc())  # which shows the call that has to be changed
    finally:
        current.in_train = False
        if current.enabled or current.adapter is not known:
            session.reset()  # the next train() may train something else


def _leave_misconfigured(problem: Exception, trace: str = "") -> NoReturn:
    complain(str(problem), trace)
    leave_word(problem)
    sys.exit(EXIT_BAD_CONFIG)


def _protected(
    current: session.Session, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        with continuing.watched():
            result = train(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit) as leaving:
        wanted = isinstance(leaving, KeyboardInterrupt) or leaving.code in (None, 0)
        if wanted and not current.preemption.came():  # else by its handler of SIGTERM
            current.left(leaving)
        else:
            current.raised(leaving)
        raise
    except RefusedError:
        current.left()
        raise
    except BaseException as problem:
        current.raised(problem)
        raise
    current.returned()
    session.trained.add(current.save_dir)
    return result


def wrap_optimizer(
    optimizer: T,
    *,
    model: Any = None,
    scheduler: Any = None,
    save_dir: str | Path = "checkpoints",
    extra_state: Any = None,
    scaler: Any = None,
    layout: Layout | None = None,
    shard_of: Callable[[str], str] | None = None,
    undo: str | None = None,
    buddy: bool = False,
) -> T:
    """Register the objects that make up the training state, and protect them if ttp is switched on (``TTP_PORT``).

    Args:
        optimizer: one of these:

            - A ``torch.optim.Optimizer``, or a list of several (a GAN's two, Muon beside AdamW): all optimizers that
              update parameters of ``model``. Wrappers and containers of optimizers are unwrapped. With several, a
              version is finished when each has stepped once, in the order of the first iteration; a loop that steps
              them a different number of times calls ``step_done()`` at the end of each iteration.
            - A ``MegatronOptimizer``, see ``ttp.adapters.megatron.protect``.
            - A ``mindspore.nn.Optimizer``. With ``model`` (a Cell) it is protected by this call, without ``model`` by
              the callbacks of ``ttp.adapters.mindspore``.
        model: the module that is trained. ttp finds a DistributedDataParallel around it, inside it, or around a part
            of it.
        scheduler: the learning-rate scheduler, or a list of several, if any.
        save_dir: directory of checkpoints, shared by all hosts. ``TTP_SAVE_DIR`` overrides it.
        extra_state: an object with ``state_dict()`` and ``load_state_dict()``, with torch also a ``torch.Generator`` or
            a ``numpy.random.Generator``; or a dict of names to such objects. Its state is captured when
            ``optimizer.step()`` ends (in a loop that calls ``step_done()``: there), so change it before
            ``loss.backward()``. An object with ``ttp_constant = True`` and a ``torch.nn.Module`` (EMA) are read when a
            checkpoint is written.
        scaler: a ``torch.amp.GradScaler``, if any.
        layout: the replica groups, if ttp cannot find them out from the objects; see docs/layouts.md.
        shard_of: function from the name of a parameter to the name of its shard, for a ``layout`` in which a rank holds
            several shards.
        undo: ``"preimage"`` keeps a copy of parameters and optimizer state from before each update, so that a rank can
            save that version when other ranks could not make the update, or when its own update was left half done.
            Costs one more copy of them in memory, and the time to make it in every step. None keeps no copy.
        buddy: True keeps a second copy of each shard that only one rank holds (ZeRO without replicas, ``fully_shard``
            over one dimension) in the memory of the next host. The copy is renewed while training goes on, every
            ``TTP_BUDDY_EVERY`` updates (k, default 10). Losing a rank or host then costs at most 2k - 1 finished steps,
            as long as a copy arrives within k updates. A host needs four times the state of its ranks in ``/dev/shm``.
            No effect if every shard has replicas. Must be equal on all ranks.

    Returns:
        The given optimizer or list, with step hooks attached; for MindSpore a wrapper cell to use in its place.

    Raises:
        ConfigError: the settings or the save_dir are unusable, or there is training state that could not be saved.
            Every rank raises it here, before training, even if only one rank is wrong. State that shows only after the
            first update is a ``UsageError`` of ``optimizer.step()`` at the beginning of the second.
        RefusedError: the controller does not accept this rank; the text says why.
        UsageError: the function was called twice with ttp switched on, or with objects of no known framework.
    """
    save_dir = _path_of(save_dir)
    _check_types(layout, shard_of, scaler, buddy)
    if session.current().processor is None:  # a second call is an error, and does not count
        asked_for(save_dir)
    if undo not in UNDO_WAYS:
        raise ConfigError(f"undo={undo!r} is not a way to undo an update; use one of {', '.join(map(repr, UNDO_WAYS))}")
    if "mindspore" in _families(optimizer):
        from ttp.adapters.mindspore.wrapping import wrap

        others = {"scheduler": scheduler, "extra_state": extra_state, "scaler": scaler, "shard_of": shard_of}
        return wrap(optimizer, model, save_dir, layout, undo, buddy, others)
    if (survivor := continuing.current()) is not None:
        survivor.wraps()
    given: dict[str, Any] = {"scheduler": scheduler, "extra_state": extra_state, "scaler": scaler, "undo": undo}
    given |= {"layout": layout, "shard_of": shard_of, "buddy": buddy}
    register(_adapter_for(optimizer, model, given), save_dir, layout, buddy=buddy)
    if survivor is not None:
        again = functools.partial(wrap_optimizer, optimizer, model=model, save_dir=save_dir, **given)
        session.current().wrap_again = again
    return optimizer


def _path_of(save_dir: object) -> str:
    given = (os.environ.get("TTP_SAVE_DIR") or None) if save_dir is None else save_dir
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise UsageError(f"wrap_optimizer(save_dir=...) takes a path, but got {save_dir!r}")
    return path


def _check_types(layout: object, shard_of: object, scaler: object, buddy: object) -> None:
    if not isinstance(buddy, bool):
        raise UsageError(f"wrap_optimizer(buddy=...) takes a bool, but got a {type(buddy).__name__}")
    if layout is not None and not isinstance(layout, Layout):
        raise UsageError(f"wrap_optimizer(layout=...) takes a ttp.Layout, but got a {type(layout).__name__}")
    if shard_of is not None and not callable(shard_of):
        raise UsageError(f"wrap_optimizer(shard_of=...) takes a function, but got a {type(shard_of).__name__}")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"wrap_optimizer(scaler=...) takes a GradScaler, but got a {type(scaler).__name__}")


def _families(optimizer: Any) -> set[str]:
    """Return the names of the packages that define the optimizer's classes; for a list, those common to all."""
    if isinstance(optimizer, (list, tuple)):
        return set.intersection(*map(_families, optimizer)) if optimizer else set()
    return {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}


def register(
    adapter: session.Adapter, save_dir: str | Path, layout: Layout | None = None, *, buddy: bool = False
) -> None:
    """Register an adapter and join the job, for ``wrap_optimizer`` and ``protect``. Raises as ``wrap_optimizer``."""
    from ttp.launch import nccl, other_jobs
    from ttp.store.history import was_launched
    from ttp.store.writable import absolute, check_places

    current = session.current()
    current.renew()
    if current.processor is None:
        asked_for(str(save_dir))
    directory = current.config.save_dir or str(save_dir)
    path = absolute(directory)
    if current.enabled:
        env = RankEnv.from_env()
        with _refused_everywhere(adapter.refused):
            again = env.launch > 0 or was_launched(path)  # a requeued job, or a new pod, counts its launches anew
            path = check_places(directory, current.config.fallback_dir, restart=again)
            if env.rank == 0:
                other_jobs.refuse_shared(path, current.config, env)
            nccl.check(current.config)
    if path in session.trained:
        log.warning(_SHARED_DIR, path)
    current.register(adapter, path, layout, buddy=buddy)


@contextlib.contextmanager
def _refused_everywhere(tell: Callable[[ConfigError | UsageError, int], None]) -> Iterator[None]:
    """Report an error in the block to the other ranks, which would otherwise wait for this rank."""
    try:
        yield
    except (ConfigError, UsageError) as problem:
        if session.current().enabled:
            tell(problem, RankEnv.from_env().world_size)
        raise


def _adapter_for(optimizer: Any, model: Any, given: Mapping[str, Any]) -> session.Adapter:
    """Make the adapter for the optimizer's framework; ``given``: the other arguments of ``wrap_optimizer``."""
    families = _families(optimizer)
    if "torch" in families:
        from torch import nn

        from ttp.adapters.torch.adapter import TorchAdapter
        from ttp.adapters.torch.loop.misuse import outside_megatron, with_megatrons_streams
        from ttp.adapters.torch.sharding.exchange import refuse_everywhere
        from ttp.adapters.versions import check_torch

        check_torch()
        if not isinstance(model, nn.Module):
            got = "" if model is None else f". {type(model).__name__} is no Module; torch.nn.ModuleList joins several"
            raise UsageError(f"wrap_optimizer() needs model=: the module whose parameters this optimizer updates{got}")
        with _refused_everywhere(refuse_everywhere):
            plain = outside_megatron(model, layout_given=given["layout"] is not None)
            extra_state = with_megatrons_streams(given["extra_state"])
            return TorchAdapter(optimizer, model=plain, **{**given, "extra_state": extra_state})
    if "megatron" in families and not isinstance(optimizer, (list, tuple)):
        from ttp.adapters.megatron.adapter import MegatronAdapter

        if model is None:
            raise UsageError("wrap_optimizer() needs model=: the chunks that this optimizer was made for")
        if needless := [f"{name}=" for name in ("scaler", "layout", "shard_of") if given[name] is not None]:
            raise UsageError(f"wrap_optimizer() takes no {', '.join(needless)} with Megatron: ttp finds it itself")
        taken = {name: given[name] for name in ("scheduler", "extra_state", "undo")}
        return MegatronAdapter(optimizer, model=model, **taken)
    kinds = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    given_kinds = ", ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in kinds) or "an empty list"
    raise UsageError(
        "wrap_optimizer() takes a torch.optim.Optimizer or a list of them, a MegatronOptimizer or a mindspore.nn."
        f"Optimizer, not {given_kinds}. Of a wrapper give the optimizers inside; let Keras and fastai use torch's"
    )


def restore() -> int:
    """Load the newest whole checkpoint of ``save_dir`` into the registered objects.

    All ranks agree on one checkpoint. Digests are verified. Checkpoints that are not whole are skipped, named in the
    log, and left alone.

    Returns:
        The restored version, i.e. the number of finished updates; 0 when there is nothing to restore.

    Raises:
        ConfigError: a checkpoint that this job has committed has vanished, or the newest needs a newer ttp.
        RestoreError: the ranks do not see one common checkpoint, and the text says which rank saw which; or no
            controller answers.
        CheckpointError: the checkpoint belongs to another model; names and shapes are listed.
        UsageError: ``wrap_optimizer`` was not called.
    """
    return session.current().restore()


def step_done() -> None:
    """Mark the end of a training step explicitly (optional).

    For loops that change state after ``optimizer.step()`` in ways that ttp cannot see, and for loops whose optimizers
    step a different number of times in an iteration. Once it has been called, a version counts as finished only at this
    call: everything from the first ``optimizer.step()`` on belongs to the update. Also call it once before the loop,
    right after ``restore()``: until its first call, in each launch, ``optimizer.step()`` ends a version. A rank that
    waits for a dead one between its update and this call holds no version: do not communicate there, or use
    ``undo="preimage"``, with which it can go back.

    Raises:
        UsageError: ``wrap_optimizer`` was not called.
    """
    adapter = session.current().adapter
    if adapter is None:
        raise UsageError("step_done() was called without wrap_optimizer(): call wrap_optimizer() first")
    adapter.step_done()


@contextlib.contextmanager
def paused(activity: str) -> Iterator[None]:
    """Declare that this rank does something other than training, on purpose, while the block runs.

    For evaluation, checkpoints of your own, a long wait for data: whatever keeps a rank away from its steps for longer
    than ``TTP_HANG_S`` and longer than ever before in this job, so that it would look like a hang. While any rank is in
    such a block, ttp reports no hang; the other ranks may wait for this rank outside of the block. A rank that is an
    update behind this one does not wait for it, and can be found to hang. ::

        with ttp.paused("evaluation"):
            evaluate(model)

    Blocks may be nested and be entered on several threads. ``paused`` is also a decorator. Other faults are noticed as
    always. Without ``TTP_PORT`` it has no effect.

    Args:
        activity: what the rank does, in a word or two; shown by ``ttp status``, cut to 80 characters.

    Raises:
        UsageError: ``activity`` is no text, or empty.
    """
    if not isinstance(activity, str) or not activity.strip():
        raise UsageError('paused() needs a text that says what this rank does: with ttp.paused("evaluation"): ...')
    with session.current().paused(" ".join(activity.split())[:ACTIVITY_MAX]):
        yield
