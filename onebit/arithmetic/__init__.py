"""Arithmetic: the papers' formulas on tensors, and their schedules; without state or traffic."""
