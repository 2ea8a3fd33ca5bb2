"""Measurements against the budgets of the design. ``python -m benchmarks`` runs all of them."""
