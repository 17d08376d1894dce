"""What was drawn: batches, shards, ledger, job.json; whether they are sound; what is taken from or made of them."""
