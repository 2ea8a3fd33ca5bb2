"""Excludes all present objects from garbage collection, so forked children need not copy them. Import it last.

``ttp.launch.warm.template`` does the same.
"""

import gc

gc.collect()
gc.freeze()
