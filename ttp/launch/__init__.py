"""Launching: an extension of torch's elastic agent that lets healthy ranks finish saving, and ``ttp run``."""
