"""What comes from others: keys, admission, dedup, quotas, the pool and the draw from it."""
