"""The stages from planned batches to compressed images, and the loop that runs them at the same time."""
