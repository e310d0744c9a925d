"""Steps that are thrown away: benchmarks, and the search for a learning rate."""
