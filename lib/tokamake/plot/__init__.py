"""Figures and tables that tell how a run went, for people and for the workflow's report."""
