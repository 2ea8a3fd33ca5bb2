"""``mindio_ttp.framework_ttp.ttp_decorator``: the names of the later generation (``tft_*``), for ranks.

Functions raise ``ttp.TtpError`` with a text that says what to do. The functions that start a processor or a controller
end the process with exit code 2, as the original's do.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ttp.compat.mindio import managing
from ttp.compat.mindio.catching import TABLE, Classify, tft_exception_handler
from ttp.compat.mindio.group_names import use_names_of
from ttp.compat.mindio.handlers import Handler, check_callable
from ttp.compat.mindio.rank import THIS, check_step
from ttp.compat.mindio.update_times import tft_can_do_uce_repair, tft_set_update_end_time, tft_set_update_start_time
from ttp.compat.mindio.values import (
    RET_EXIT,
    Action,
    OptimizerType,
    RepairType,
    ReportState,
    for_mindspore,
)
from ttp.errors import ConfigError, TtpError, UsageError
from ttp.mindio.handlers import HandlerKind
from ttp.processor.last_words import complain

log = logging.getLogger("ttp.compat.mindio")

EXPORT_VERSIONS = ("MindSpeed", "MindSpeed-LLM")

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    "get_device",
    "get_mindio_export_version",
    "set_mindio_export_version",
    "tft_can_do_uce_repair",
    "tft_destroy_controller",
    "tft_destroy_processor",
    "tft_end_updating_os",
    "tft_exception_handler",
    "tft_get_reboot_type",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "tft_init_controller",
    "tft_init_processor",
    "tft_is_reboot_node",
    "tft_pause_train",
    "tft_register_clean_handler",
    "tft_register_decrypt_handler",
    "tft_register_exception_handler",
    "tft_register_exit_handler",
    "tft_register_rebuild_group_handler",
    "tft_register_rename_handler",
    "tft_register_repair_handler",
    "tft_register_rollback_handler",
    "tft_register_save_ckpt_handler",
    "tft_register_stop_handler",
    "tft_register_stream_sync_handler",
    "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_zit_upgrade_rebuild_handler",
    "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rollback_handler",
    "tft_report_error",
    "tft_report_load_ckpt_step",
    "tft_reset_limit_step",
    "tft_set_dp_group_info",
    "tft_set_optimizer_replica",
    "tft_set_step_args",
    "tft_set_update_end_time",
    "tft_set_update_start_time",
    "tft_start_controller",
    "tft_start_copy_os",
    "tft_start_processor",
    "tft_start_updating_os",
    "tft_wait_next_action",
    "tft_wait_repair_action",
]

# ----------------------------------------------------------------------------------------------- controller, processor


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Declare that this process will start the controller.

    Args:
        rank: rank of this process; -1 in a launcher.
        world_size: number of ranks.
        enable_local_copy: has no effect here.
        enable_arf: has no effect here.
        enable_zit: has no effect here but a log line.

    Raises:
        ConfigError: ``rank`` is out of range, or MindSpore does not support the options.
    """
    if for_mindspore() and (enable_local_copy or enable_zit):
        raise ConfigError("MindSpore supports neither local copies nor elastic training: pass False for both")
    managing.describe(rank, world_size)
    if enable_zit:
        log.info("elastic training (ZIT) resumes from the checkpoint: its handlers are kept, but never called")


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Start a controller process at ``bind_ip:port``. If that fails, end this process with exit code 2."""
    try:
        managing.start(bind_ip, port, enable_tls, tls_info, THIS.handlers.decrypt)
    except TtpError as problem:
        _give_up("tft_start_controller", problem)


def tft_destroy_controller() -> None:
    """Detach this process from its controller, which ends by itself when no rank needs it any more."""
    managing.stop()


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Set the rank of this process, and which faults are repaired. If these are not valid, exit with code 2.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        enable_local_copy: has no effect here.
        enable_tls: whether connections use TLS, with ``tls_info``.
        tls_info: certificates and key, see docs/mindio.md.
        enable_uce: whether memory and network errors are repaired in the process.
        enable_arf: whether a new process may replace a rank that has died.
        enable_zit: whether the job, under ``ttp run --elastic``, may resume from the checkpoint with another number of
            hosts.
    """
    try:
        THIS.describe(rank, world_size, enable_tls, tls_info, uce=enable_uce, arf=enable_arf, zit=enable_zit)
    except TtpError as problem:
        _give_up("tft_init_processor", problem)
    if enable_arf and not for_mindspore():
        use_names_of(lambda: THIS.participant.generation() if THIS.participant is not None else 0)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Join the job. If the settings are wrong or the controller refuses this rank, exit with code 2."""
    try:
        if local_ip:
            os.environ.setdefault("TTP_ADDRESS", local_ip)
        THIS.start(master_ip, port)
    except TtpError as problem:
        _give_up("tft_start_processor", problem)


def tft_destroy_processor() -> None:
    """Leave the job in good order, together with all other ranks."""
    THIS.leave()


def _give_up(function: str, problem: TtpError) -> NoReturn:
    complain(f"{function}: {problem}")
    raise SystemExit(RET_EXIT)


# --------------------------------------------------------------------------------------------------------- the updates


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Mark the start of an update, before the optimizer writes. Waits while the job is frozen.

    With torch, raises FORCE STOP if the training thread has to leave its loop.
    """
    THIS.start_updating()


def tft_start_copy_os() -> None:
    """Accept the start of a local copy, which has no effect here. Raises ``UsageError`` if no processor was started."""
    _ = THIS.joined


def tft_end_updating_os(step: int) -> None:
    """Mark the end of the update that leads to ``step``."""
    THIS.end_updating(step)


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """Set the replica sets: an entry ``{"rank_list", "replica_cnt", "replica_shift"}`` per ``OptimizerType``."""
    THIS.set_replicas(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """Check the data-parallel group for elastic training. This has no other effect.

    Raises:
        ConfigError: the rank is not in the group.
    """
    if not isinstance(dp_rank_list, Iterable) or rank not in list(dp_rank_list):
        raise ConfigError(f"dp_rank_list {dp_rank_list!r} must be a list that holds rank {rank}")


def tft_set_step_args(args: Any) -> None:
    """Set the arguments for handlers. No effect for None, and in programs with ``set_mindio_export_version``, whose
    handlers get the arguments of the training function.
    """
    if args is not None and THIS.handlers.version not in EXPORT_VERSIONS:
        THIS.handlers.args = args


def tft_reset_limit_step() -> None:
    """Make threads that wait in ``tft_start_updating_os`` leave their loops, by raising FORCE STOP there."""
    THIS.joined.reset_limit_step()


def tft_pause_train(cur_step: int) -> None:
    """Mark the end of a step, and wait there while the job is paused."""
    THIS.pause(cur_step)


# ---------------------------------------------------------------------------------------------------------- the faults


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """Report an error.

    Args:
        error_type: the value of a ``ReportState``. For RS_UNKNOWN the job is saved and this process ends.
        error_code: error code of the device.
    """
    THIS.report(error_type, error_code)


def tft_wait_next_action() -> int:
    """Wait until this rank is cleaned (torch) or repaired (MindSpore), and return the value of an ``Action``."""
    action = THIS.joined.wait_next_action()
    if for_mindspore() and action.value == Action.RETRY.value:
        action = THIS.joined.wait_repair_action()  # MindSpore's client does not call tft_wait_repair_action itself
    return int(action)


def tft_wait_repair_action() -> int:
    """Wait until this rank is repaired, and return the value of an ``Action``."""
    return int(THIS.joined.wait_repair_action())


def tft_get_repair_step() -> int:
    """Return the step after which training continues; 0 without a processor."""
    return 0 if THIS.participant is None else THIS.participant.repair_step()


def tft_get_repair_type() -> str:
    """Return the type of the last repair: ``"retry"``, ``"recover"``, ``"dump"``, or ``"unknow"`` (the original's)."""
    return (THIS.participant is not None and THIS.participant.repair_type()) or "unknow"


def tft_report_load_ckpt_step(step: int) -> None:
    """Report, from a repair handler, that it has loaded the checkpoint of ``step``."""
    step = check_step("tft_report_load_ckpt_step", step)
    THIS.joined.report_loaded_step(step)


def tft_is_reboot_node() -> bool:
    """Return whether this process replaces another one in a running job. Call this after the processor's start."""
    return THIS.participant is not None and THIS.participant.rebooted


def tft_get_reboot_type() -> str:
    """Return how this process replaces another: ``"hot switch"`` if that one still lived, else ``"arf"``."""
    return "hot switch" if THIS.participant is not None and THIS.participant.was_guest else "arf"


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Classify) -> None:
    """Report exceptions with ``fault_pattern`` in their text as ``fault_type``, a name of ``ReportState``.

    Args:
        fault_pattern: part of the exception's text.
        fault_type: the state to report.
        fault_handle: function that gets the text and returns ``fault_pattern``, or another known pattern.
    """
    TABLE.add(fault_pattern, fault_type, fault_handle)


def set_mindio_export_version(framework_type: str) -> None:
    """Set the framework that the program is written for.

    Raises:
        ConfigError: ``framework_type`` is not one of ``EXPORT_VERSIONS``.
    """
    if framework_type not in EXPORT_VERSIONS:
        raise ConfigError(f"export version {framework_type!r} is not one of {', '.join(EXPORT_VERSIONS)}")
    THIS.handlers.version = framework_type
    os.environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"
    THIS.halt_before_dump()


def get_mindio_export_version() -> str | None:
    """Return the value given to ``set_mindio_export_version``; None if it was not called."""
    return THIS.handlers.version or None


def get_device() -> int | None:
    """Return the index of the device that training uses, also on threads of handlers; None if it uses none."""
    if for_mindspore():
        mindspore: Any = sys.modules.get("mindspore")
        return None if mindspore is None else int(mindspore.context.get_context("device_id"))
    return None if THIS.participant is None else THIS.participant.device_index


# --------------------------------------------------------------------------------------------------------- the handlers


def _registering(kind: HandlerKind) -> Callable[..., None]:
    def register(func: Handler, ctx: Any = None) -> None:
        THIS.register(kind, func, ctx)

    register.__doc__ = f"Register the handler for {kind.name.lower()}; see docs/mindio.md for its arguments."
    return register


tft_register_save_ckpt_handler = _registering(HandlerKind.SAVE)
tft_register_rename_handler = _registering(HandlerKind.RENAME)
tft_register_exit_handler = _registering(HandlerKind.EXIT)
tft_register_stop_handler = _registering(HandlerKind.STOP)
tft_register_clean_handler = _registering(HandlerKind.CLEAN)
tft_register_repair_handler = _registering(HandlerKind.REPAIR)
tft_register_rollback_handler = _registering(HandlerKind.ROLLBACK)
tft_register_rebuild_group_handler = _registering(HandlerKind.REBUILD)
tft_register_stream_sync_handler = _registering(HandlerKind.STREAM_SYNC)


def _elastic(name: str) -> Callable[..., None]:
    def register(func: Handler, ctx: Any = None) -> None:
        if for_mindspore():
            raise UsageError("MindSpore does not support elastic training")
        check_callable(name, func)

    register.__doc__ = (
        "Accept a handler for elastic training. It is never called: the job restarts with the ranks that are left."
    )
    return register


tft_register_zit_downgrade_rebuild_handler = _elastic("downgrade_rebuild")
tft_register_zit_upgrade_rebuild_handler = _elastic("upgrade_rebuild")
tft_register_zit_upgrade_repair_handler = _elastic("upgrade_repair")
tft_register_zit_upgrade_rollback_handler = _elastic("upgrade_rollback")


def tft_register_decrypt_handler(decryptor: Callable[[str], str]) -> None:
    """Register a function that decrypts the content of ``tlsPkPwd`` to the password of the TLS key."""
    check_callable("decrypt", decryptor)
    THIS.handlers.decrypt = decryptor
