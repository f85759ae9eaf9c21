"""The ZeRO engine around the one-bit optimizers. Installed as `onebit.zero`.

`ShardedOnebitAdam` (shard.py) shards across the slow axis itself, for clusters with one rank per node.
"""

if __name__ != "onebit.zero":
    raise ImportError(f"this package is onebit.zero, it was imported as {__name__!r}; use `from onebit import zero`")

from .shard import ShardedOnebitAdam

__all__ = ["ShardedOnebitAdam"]
