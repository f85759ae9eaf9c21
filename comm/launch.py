"""Placeholder."""
from .sim_transport import SimTransport


def init() -> SimTransport:
    return SimTransport()
