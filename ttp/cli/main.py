"""``ttp``: one program that launches protected jobs, shows their state, and examines what they saved.

Exit codes, for every command but ``run``: 0 yes or done; 1 a negative finding, such as a damaged checkpoint or no
controller; 64 bad usage or configuration; 70 a bug; 74 output that cannot be written; 130 interrupted. ``ttp run`` has
the exit codes of the job.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

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


PANELS = {
    "Launch": tuple(PASSED_ON),  # only for the list of commands: ``main`` does not run these through typer
    "A running job": ("status", "metrics", "web", "save", "report-fault", "watch-node", "clusterd"),
    "What was saved": ("list", "verify", "inspect", "convert", "reshard", "recover", "redundancy", "verdict", "goodput",
                       "incidents", "suspects"),
    "Trust": ("simulate", "chaos"),
    "About": ("version",),
}  # fmt: skip
"""The commands, as ``ttp --help`` groups them."""
HOMES = {"list": ("listing", "list_checkpoints"), "inspect": ("inspection", "inspect")}
"""Module and function of a command, where they do not have its name."""


def _command(name: str) -> Callable[..., Any]:
    if name in PASSED_ON:
        return PASSED_ON[name]
    own = name.replace("-", "_")
    module, function = HOMES.get(name, (own, own))
    command: Callable[..., Any] = getattr(importlib.import_module(f"ttp.cli.{module}"), function)
    return command


def _print_version(asked: bool) -> None:
    if asked:
        _command("version")()
        raise typer.Exit


def _root(
    _: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Make typer treat ``ttp`` as a group of commands."""


def _app(wanted: str) -> typer.Typer:
    """Return ``ttp`` with one command, or with all if there is none of this name: to import all takes half a second.

    The docstring of a command is its help, with paragraphs kept and lines joined to fit any width.
    """
    app = typer.Typer(
        name="ttp",
        help="Try To Persist: when a rank of a training job dies, no finished step is lost.",
        epilog="Every command explains itself: ttp COMMAND --help. Exit codes: 0 fine, 1 a negative finding, 64 bad "
        "usage.",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    known = any(wanted in names for names in PANELS.values())
    for panel, names in PANELS.items():
        for name in names:
            if known and name != wanted:
                continue
            command = _command(name)
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.__doc__ or "").split("\n\n"))
            app.command(name, help=text.replace("[", "\\["), rich_help_panel=panel)(command)
    return app


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
        return int(_app(arguments[0])(arguments, prog_name="ttp", standalone_mode=False) or EXIT_TRAINED)
    except SystemExit as leaving:
        if not leaving.code:  # what a shell asked for to complete a command line is printed
            return EXIT_TRAINED
        # rich and typer exit so when the reader of `ttp list DIR | head` has closed the pipe
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
