"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`; empty until the engine lands."""

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")
