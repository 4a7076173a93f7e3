"""Programs made from programs: the same attention for batches that lie in memory another way."""
