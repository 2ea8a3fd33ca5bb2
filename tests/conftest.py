"""For all tests: a busy machine is no finding of hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ttp",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors, HealthCheck.data_too_large],
)
settings.load_profile("ttp")
