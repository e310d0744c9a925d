"""Checks of the back ends, one file each, with the name of the back end.

They do not import torch, because validation of a config and dry runs call them, too. A file has

- `check_settings(train)`, for facts of the config alone;
- `check_precision(train, device_type)`, for the precision: of the config, if it states one, and on
  the ranks, whose device decides an empty one; device_type is None where the device is not known.
  Both raise ValueError;
- literals about features that only some back ends have: OFFLOADS (setting of host memory → lowest
  zero_stage; none if it is missing) and EXTRA_PASS (whether an optimizer can ask for a second pass
  over the batches of a step).
"""
