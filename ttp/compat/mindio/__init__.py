"""The package ``mindio_ttp`` on ttp. Importing this module installs it; see docs/mindio.md.

It only translates names, signatures and codes of MindIO to those of ``ttp``.
"""

from __future__ import annotations

from ttp.compat.mindio.placing import put_into_place

put_into_place()
