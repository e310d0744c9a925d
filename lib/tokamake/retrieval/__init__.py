"""Retrieval: embeddings on disk, their search with and without an index, and its evaluation."""
