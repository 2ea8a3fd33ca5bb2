"""Packages with the names and signatures of other services, so that programs written for these run on ttp unchanged."""
