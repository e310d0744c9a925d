"""Optimizers, one file each; docs/optimizers.md compares them.

A plug-in has a function `build(groups, settings, whole)` and three literals:
- SETTINGS: the settings of the section `optimizer` that it uses, with their published values.
- ELEMENTWISE: whether the update of each element depends on that element only. Such optimizers work
  on any parts of the parameters.
- STATE: the tensors of its state by name: "like_parameter" (shape and layout of the parameter) or
  "replicated" (the same on all ranks that hold parts of the parameter).
"""
