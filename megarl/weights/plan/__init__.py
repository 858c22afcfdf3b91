"""The plan of a weight sync: buckets, their order and digests."""
