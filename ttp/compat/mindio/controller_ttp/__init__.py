"""``mindio_ttp.controller_ttp``."""
