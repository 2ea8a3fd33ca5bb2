"""Follows the training loop with hooks: the bracket around an update, the barrier, post-steps. Start with ``hooks``.

In the order of a step::

    forward_hooks, hook, hooks    what torch calls at the points of a step
    no_sync, closures, stepping   whether a backward pass is exchanged, when a closure runs, whether ``step()`` runs
    barrier, stream_barrier       ranks wait for each other before an update, if there are several shards
    bracket, turns, between       where an update and a version begin and end; copies between the steps of one version
    post_step_state               scheduler and scaler after an update (``schedule_habit``, ``scaler_reading``)
    repeating                     a call of a step function is made again (``ttp.one_step``)
    unwrap_optimizer              optimizers and schedulers, as the program gives them, in one form

These compare, during the first updates or always, and tell or refuse what a save would get wrong: ``misuse`` (where
updates are made), ``untouched`` (weights between passes), ``followers`` (parameters that no optimizer trains),
``swapped`` (weights that an evaluation puts in), ``late_changes`` (extra states), ``communication`` (collectives).
"""
