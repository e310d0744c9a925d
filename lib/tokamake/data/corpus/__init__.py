"""Documents before they are tokens: the table of corpora, raw files, the plan, duplicates."""
