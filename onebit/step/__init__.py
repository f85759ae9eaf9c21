"""A step: what a bucket's step says, who runs those of all buckets, how a bucket is exchanged, when it may leave."""
