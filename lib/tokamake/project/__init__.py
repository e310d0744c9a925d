"""Project folders: a config, a table of corpora and a Snakefile beside a user's data."""
