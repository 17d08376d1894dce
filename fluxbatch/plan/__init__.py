"""What will be drawn, in which batches and shards, by whom, and what it will cost. No tensors, no pictures."""
