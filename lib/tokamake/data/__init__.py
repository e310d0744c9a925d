"""Raw documents to tokens, tokens to indexes and batches: all that comes before the model."""
