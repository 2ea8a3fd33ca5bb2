"""The same tests, driven by coverage: ``python -m tests.fuzz.atheris_targets NAME -max_total_time=60``.

Needs ``pip install atheris`` (Python 3.11 or older); not part of CI. Without a name it lists the targets. The arguments
after the name are for libFuzzer: a directory keeps the corpus, ``-runs=N`` and ``-max_total_time=S`` end the search,
and a file repeats one input. A finding ends it with the exception, and is left as ``crash-...`` in the current
directory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

Target = Callable[[bytes], object]

MODULES = {
    "config": ("test_settings", "test_what_launchers_say"),
    "directories": ("test_damage_anywhere",),
    "encoding": ("test_changed_bytes_behind_the_checksum", "test_bytes_that_are_no_state", "test_a_page_of_noise"),
    "incident_files": ("test_changed_bytes", "test_lines_that_say_something_else"),
    "manifests": ("test_changed_bytes", "test_nonsense_that_is_sealed"),
    "torch": ("test_a_table_that_says_something_else", "test_rank_local_state_of_changed_bytes"),
    "wire": (
        "test_bytes_become_a_report_or_an_error_in_words",
        "test_no_sequence_of_reports_stops_the_controller",
        "test_what_is_said_on_other_streams_does_not_touch_a_healthy_job",
        "test_no_sequence_of_orders_stops_a_processor",
    ),
}
"""By module of tests: those whose inputs are made out of bytes."""


def names() -> list[str]:
    """Return the targets' names as on the command line: ``wire.test_no_sequence_of_orders_stops_a_processor``."""
    return [f"{module}.{test}" for module, tests in MODULES.items() for test in tests]


def target(name: str) -> Target:
    """Return the function that takes a fuzzer's bytes."""
    module, _, test = name.partition(".")
    found: Target = getattr(importlib.import_module(f"tests.fuzz.test_{module}"), test).target
    return found


def main(arguments: list[str]) -> int:
    """Fuzz one target until libFuzzer ends the process."""
    if not arguments or arguments[0] not in names():
        print("\n".join(names()))
        return 64 if arguments else 0
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["ttp"]):
        chosen = target(arguments[0])
    atheris.Setup([sys.argv[0], *arguments[1:]], chosen)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
