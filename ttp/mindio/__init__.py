"""MindIO's later generation: the program's own handlers save, repair and resume, in rounds that the controller leads.

``protocol`` is pure, as is ``ttp.core``, which it extends at two interfaces: ``ttp.core.controller.program_recovery``
for the controller and ``ttp.core.rank.program`` for a rank. ``handlers`` has the part of a rank and that of a manager.
The names of ``mindio_ttp`` are in ``ttp.compat.mindio``. ``ttp.core`` does not depend on this package.
"""
