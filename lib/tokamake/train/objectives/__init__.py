"""Objectives that a model learns: a folder each."""
