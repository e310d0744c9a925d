"""Pydantic models of the config: one model per section of config/config.yaml.

The attribute docstring of each field becomes its description in config/schema.json and in
docs/reference/config.md. Settings say what to build; the Snakemake profile says where.
"""
