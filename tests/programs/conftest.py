from __future__ import annotations

from tests.e2e.conftest import make_job

__all__ = ["make_job"]
