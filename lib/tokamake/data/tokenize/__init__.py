"""Stage `tokenize`: raw files to shards."""
