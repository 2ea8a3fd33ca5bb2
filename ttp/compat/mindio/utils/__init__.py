"""``mindio_ttp.utils``."""
