"""MindIO's later generation: jobs whose own handlers save, repair and resume, led by the controller in rounds.

``protocol`` is pure, like ``ttp.core``, which it extends by two seams: ``ttp.core.controller.program_recovery`` for the
controller and ``ttp.core.rank.program`` for a rank. ``handlers`` is the side of a rank and of a manager. The names of
``mindio_ttp`` are in ``ttp.compat.mindio``. Nothing in ``ttp.core`` knows of this package.
"""
