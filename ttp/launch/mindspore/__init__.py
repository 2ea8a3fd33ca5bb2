"""``ttp run --mindspore``: starts scheduler and workers as msrun does, and lets healthy ranks finish saving.

msrun itself kills the siblings of a worker that died within a second (``--join=True``), or watches no worker
(``--join=False``). Nothing here imports MindSpore or torch: the workers do.
"""
