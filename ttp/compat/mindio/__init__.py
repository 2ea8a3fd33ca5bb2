"""The package ``mindio_ttp`` on this service. Importing this module installs it; see docs/mindio.md.

Nothing in it decides anything: it translates names, signatures and codes of MindIO to those of ``ttp``.
"""

from __future__ import annotations

from ttp.compat.mindio.placing import put_into_place

put_into_place()
