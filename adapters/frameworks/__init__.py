"""Adapters to the trainers of other projects. Each module imports its framework; see docs/frameworks.md."""

import importlib.util

from ttp.errors import ConfigError

if importlib.util.find_spec("torch") is None:
    raise ConfigError("the adapters to trainers need torch, which is not installed: pip install 'ttp-ft[torch]'")
