"""Arithmetic: what the papers compute, and when; the variance between dense steps."""
