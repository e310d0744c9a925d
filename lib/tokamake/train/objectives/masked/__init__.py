"""The objective masked: restore masked tokens, as BERT does."""
