"""``ttp web``: a read-only web page that shows a job, served by a separate process.

``looks`` polls the controller and reads incident files, ``view`` computes the page's data from them, ``story`` computes
the data of one incident, ``app`` is the web application, ``server`` runs it. The page itself is in ``static``.
"""
