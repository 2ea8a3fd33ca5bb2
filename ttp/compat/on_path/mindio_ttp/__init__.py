"""What processes find that were told by their environment to use ttp's ``mindio_ttp``; see ``placing``."""

from ttp.compat.mindio.placing import stand_in

stand_in()
