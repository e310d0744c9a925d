"""The stage `tokenize`: raw files to shards of tokens."""
