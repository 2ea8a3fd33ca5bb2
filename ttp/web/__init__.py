"""``ttp web``: a page for people that shows a job, in a process of its own. It reads, and can change nothing.

``looks`` asks the controller and reads incident files, ``view`` says what that means, ``story`` draws one incident,
``app`` serves it, ``server`` listens. The page itself is in ``static``.
"""
