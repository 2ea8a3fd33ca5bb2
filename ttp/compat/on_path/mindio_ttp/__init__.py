"""The ``mindio_ttp`` that processes find by ``PYTHONPATH``; it replaces itself, see ``ttp.compat.mindio.placing``."""

from ttp.compat.mindio.placing import stand_in

stand_in()
