"""The stub ``mindio_ttp`` found through ``PYTHONPATH``, which replaces itself; see ``ttp.compat.mindio.placing``."""

from ttp.compat.mindio.placing import stand_in

stand_in()
