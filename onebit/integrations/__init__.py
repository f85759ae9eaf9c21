"""Integrations: the family inside other libraries' training loops. Each module needs its library, as an extra."""
