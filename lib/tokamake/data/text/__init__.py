"""Documents before they are tokens: tables of corpora, raw files, the plan, duplicates."""
