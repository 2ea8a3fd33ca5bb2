"""Imported last by the process that tests fork from: what is there is no garbage, and children need not copy it.

So does ``ttp.launch.warm.template``.
"""

import gc

gc.collect()
gc.freeze()
