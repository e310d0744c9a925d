"""Figures and tables of runs, for the workflow's report."""
