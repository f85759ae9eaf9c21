"""Layout: the place of each parameter in flat buckets, the contents of a bucket, and the elements that may move."""
