"""Raw files to shards of tokens: `tokenize` and what makes it fast and lossless."""
