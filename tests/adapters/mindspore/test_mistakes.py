"""A job with a wrong configuration, whose program uses no decorator: one error message, exit code 64, and no
restart.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.mindspore.job import SMALL, Job
from tests.adapters.mindspore.test_kills import RUN_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mindspore-jobs"), pytest.mark.timeout(900)]


def test_the_documented_program_ends_with_64_and_is_not_started_again(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, arguments=SMALL, max_restarts=3, env={"MS_ENABLE_TFT": ""}).run(RUN_S, ends=64)
    assert "set MS_ENABLE_TFT='{TTP:1}'" in job.output and "started again" not in job.output
