"""``ttp web``: a page for people that shows a job, in a process of its own. It reads, and can change nothing.

``looks`` asks the controller and reads incident files, ``view`` makes the page's data from that, ``story`` draws one
incident, ``app`` serves the page, ``server`` listens. The page itself is in ``static``.
"""
