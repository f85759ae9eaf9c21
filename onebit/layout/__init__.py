"""Layout: which parameters lie where in flat buckets, what a bucket holds, which elements may move."""
