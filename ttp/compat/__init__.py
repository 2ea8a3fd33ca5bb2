"""Packages under the names of other services, so that programs written for them run unchanged on ttp."""
