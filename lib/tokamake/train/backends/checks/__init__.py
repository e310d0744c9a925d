"""Checks of the back ends, one file each, with the name of the back end.

They do not import torch, because validation of a config and dry runs call them, too. A file has

- `check_settings(train)`, for the settings of a config; it raises ValueError.
- `check_run(run, device_type)`, for a resolved run; it raises UserError.
- literals about features that only some back ends have: OFFLOADS (setting of host memory → lowest
  zero_stage; none if it is missing) and SAMPLED_LABELS (whether it can compute gradients of labels
  that are sampled from the model).
"""
