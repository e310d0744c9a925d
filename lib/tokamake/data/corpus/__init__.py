"""Documents before tokenization: the table of corpora, raw files, the plan, duplicates."""
