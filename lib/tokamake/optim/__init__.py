"""Optimizers, one file each; docs/reference/optimizers.md compares them.

A plug-in has a function `build(groups, settings, whole)`, the literal SETTINGS (the settings of the
section `optimizer` that it uses, with their published values; see `config/plugin_settings.py`), and
the literals of `OptimizerFacts` in `config/optimization.py`: ELEMENTWISE, STATE, and further
literals if the default does not hold.
"""
