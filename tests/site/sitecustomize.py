"""Imported by every Python that a test starts: a tenth of a start with torch would be the search for garbage."""

import gc

gc.set_threshold(100_000, 50, 100)
