"""The torch adapter: hooks around an update, capture of rank-local state, checkpoints that stock torch reads.

Begin with ``adapter.TorchAdapter.attach``, which connects everything. A step passes ``loop`` (``hooks``: what is
called; ``bracket``: when an update begins and ends), and that calls ``around_update``. A save passes ``source``
(``write_pieces``), after ``saving.standing`` has said what can be saved. A restore passes ``restoring.registered``::

    loop          follows the training loop; decides nothing but where a version ends
    local_state   what only one rank has, in its page, before and after each update
    device        whatever may not wait for an accelerator: copies from it, and how far it has come
    sharding      which rank holds which part of the state, and under which names
    saving        files of a checkpoint, copies to go back to, and the checks that a save will be possible
    restoring     from a checkpoint, or from the memory of a survivor, into live objects
    convert       ``ttp convert``
    regroup, transport   process groups of survivors, connected anew (``--continuity keep``)
"""

from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer as ReplicatedOptimizer
