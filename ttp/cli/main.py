"""``ttp``: one program that launches protected jobs, shows their state, and examines what they saved.

Exit codes, for every command but ``run``: 0 yes or done; 1 a negative finding, such as a damaged checkpoint or no
controller; 64 bad usage or configuration; 70 a bug; 74 output that cannot be written; 130 interrupted. ``ttp run`` has
the exit codes of the job.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ttp.cli import (
    chaos,
    clusterd,
    convert,
    goodput,
    incidents,
    inspection,
    listing,
    metrics,
    recover,
    redundancy,
    report_fault,
    reshard,
    save,
    simulate,
    status,
    suspects,
    verdict,
    verify,
    version,
    watch_node,
    web,
)
from ttp.cli.output import complain, open_streams, silence
from ttp.errors import (
    EXIT_BAD_CONFIG,
    EXIT_NOT_SAVED,
    EXIT_PORT_TAKEN,
    EXIT_TRAINED,
    CheckpointError,
    ConfigError,
    TtpError,
    UsageError,
)

EXIT_NEGATIVE = 1
EXIT_BUG = EXIT_NOT_SAVED
"""Exit code after an unexpected exception, as in sysexits.h. Python's 1 would be a finding: the job runs, to a script
that asks ``ttp verdict``.
"""
EXIT_NO_OUTPUT = 74
"""Exit code if the output cannot be written, as in sysexits.h."""
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
"""Exit code when the reader of the output has closed the pipe: 128 + SIGPIPE, as in shells."""

app = typer.Typer(
    name="ttp",
    help="Try To Persist: when a rank of a training job dies, no finished step is lost.",
    epilog="Every command explains itself: ttp COMMAND --help. Exit codes: 0 fine, 1 a negative finding, 64 bad usage.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        version.version()
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Make typer treat ``ttp`` as a group of commands."""


def _launch(argv: list[str]) -> int:
    """Launch a job like torchrun, protected: ttp run [torchrun's flags] script.py ... (or: ttp run --mindspore ...)"""
    from ttp.launch.run import run

    return run(argv)


def _control(argv: list[str]) -> int:
    """Run one controller on its own. `ttp run` and rank 0 start one by themselves."""
    from ttp.controller.__main__ import main as control

    try:
        code = control(argv)
        return EXIT_BAD_CONFIG if code == EXIT_PORT_TAKEN else code  # which only launchers tell apart
    except SystemExit as leaving:  # argparse has printed its help or its error
        return EXIT_TRAINED if leaving.code in (None, 0) else EXIT_BAD_CONFIG


def _reset(argv: list[str]) -> int:
    """Kill and restart a script's MindSpore ranks as MindCluster's reset.json says, like its reset_process.py."""
    from ttp.launch.reset_process import main as look_after

    return look_after(argv)


PASSED_ON: dict[str, Callable[[list[str]], int]] = {"run": _launch, "controller": _control, "reset-process": _reset}
"""Commands that parse their own arguments, ``--help`` included: these are passed on unchanged."""


def _register(name: str, panel: str, command: Callable[..., Any]) -> None:
    """Add a command. Its docstring is its help, with paragraphs kept and lines joined to fit any width."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=text.replace("[", "\\["), rich_help_panel=panel)(command)


_LAUNCH, _RUNNING, _SAVED, _TRUST, _ABOUT = "Launch", "A running job", "What was saved", "Trust", "About"

for _name, _command in PASSED_ON.items():
    _register(_name, _LAUNCH, _command)  # only for the list of commands: ``main`` does not run these through typer
_register("status", _RUNNING, status.status)
_register("metrics", _RUNNING, metrics.metrics)
_register("web", _RUNNING, web.web)
_register("save", _RUNNING, save.save)
_register("report-fault", _RUNNING, report_fault.report_fault)
_register("watch-node", _RUNNING, watch_node.watch_node)
_register("clusterd", _RUNNING, clusterd.clusterd)
_register("list", _SAVED, listing.list_checkpoints)
_register("verify", _SAVED, verify.verify)
_register("inspect", _SAVED, inspection.inspect)
_register("convert", _SAVED, convert.convert)
_register("reshard", _SAVED, reshard.reshard)
_register("recover", _SAVED, recover.recover)
_register("redundancy", _SAVED, redundancy.redundancy)
_register("verdict", _SAVED, verdict.verdict)
_register("goodput", _SAVED, goodput.goodput)
_register("incidents", _SAVED, incidents.incidents)
_register("suspects", _SAVED, suspects.suspects)
_register("simulate", _TRUST, simulate.simulate)
_register("chaos", _TRUST, chaos.chaos)
_register("version", _ABOUT, version.version)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are printed as one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    try:
        if arguments and arguments[0] in PASSED_ON:
            return PASSED_ON[arguments[0]](arguments[1:])
        return _look(arguments or ["--help"])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TtpError as problem:
        complain(str(problem))
        return _exit_code(problem)


def _look(arguments: list[str]) -> int:
    try:
        return int(app(arguments, prog_name="ttp", standalone_mode=False) or EXIT_TRAINED)
    except SystemExit:  # rich and typer exit so when the reader of `ttp list DIR | head` has closed the pipe
        silence(sys.stdout)
        return EXIT_PIPE_CLOSED
    except OSError as problem:
        silence(sys.stdout)
        complain(f"cannot read or write: {problem}")
        return EXIT_NO_OUTPUT
    except TtpError:
        raise
    except Exception as problem:
        return _usage_error(problem)


def _exit_code(problem: TtpError) -> int:
    bad_usage = isinstance(problem, (ConfigError, UsageError)) and not isinstance(problem, CheckpointError)
    return EXIT_BAD_CONFIG if bad_usage else EXIT_NEGATIVE


def _usage_error(problem: Any) -> int:
    """Print typer's message about a wrong command line, and return the exit code.

    The class of the exception is click's or typer's own, depending on typer's version; both have the same methods.
    """
    if type(problem).__name__ == "Abort":
        return EXIT_INTERRUPTED
    if not hasattr(problem, "format_message"):
        traceback.print_exception(problem)
        return EXIT_BUG
    context = getattr(problem, "ctx", None)
    command = context.command_path if context is not None else "ttp"
    said = problem.format_message()
    complain(f"{said if said.endswith(('.', '?')) else f'{said}.'} Try: {command} --help")
    return EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
