"""Chaos: real jobs, hurt on purpose by a script or by a drawn campaign, and checked after every incident."""
