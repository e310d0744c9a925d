"""The page report.html: figures with zoom, tables and texts of all runs, in one file."""
