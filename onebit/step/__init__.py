"""The step: the phases of a bucket's step, the driver of all buckets, their exchange, and overlap with backward."""
