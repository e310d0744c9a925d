"""Raw documents to tokens, tokens to indexes and batches: all steps before the model."""
