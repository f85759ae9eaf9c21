"""Plain functions that shard or slice a plain model.

`fsdp.py` shards inside a node, `tensor.py` slices each layer.
"""
