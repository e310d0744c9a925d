"""Back ends: each file has an `Engine` that trains a model on the ranks of a run."""
