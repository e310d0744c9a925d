"""Optimizers, one file each; docs/optimizers.md compares them.

A plug-in has `build(groups, settings, whole)` and three literals: SETTINGS, the settings of the
section `optimizer` that it uses with their published values; ELEMENTWISE, whether each element is
updated by itself, so that any cut of the parameters will do; and STATE, its state's tensors by
name: "like_parameter" (its shape and layout) or "replicated" (alike on all ranks of its parts).
"""
