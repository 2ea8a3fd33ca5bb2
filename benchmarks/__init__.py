"""Benchmarks, compared with the budgets of the design. ``python -m benchmarks`` runs all of them."""
