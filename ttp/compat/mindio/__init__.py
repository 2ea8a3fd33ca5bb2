"""The package ``mindio_ttp`` on this service. Importing this puts it into place; see docs/mindio.md.

Nothing of it decides anything: it translates names, signatures and codes onto ``ttp``.
"""

from __future__ import annotations

from ttp.compat.mindio.placing import put_into_place

put_into_place()
