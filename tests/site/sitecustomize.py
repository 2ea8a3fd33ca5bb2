"""Makes garbage collection rare in every Python that a test starts: it would take a tenth of a start with torch."""

import gc

gc.set_threshold(100_000, 50, 100)
