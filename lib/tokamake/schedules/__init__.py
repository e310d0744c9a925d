"""Learning-rate schedules, one file each; `Schedule` is what the loop asks.

A plug-in has SETTINGS, the settings of the section `schedule` that it uses with their published
values, and `factor`, which gives the share of the peak once warm-up is over. Position and lengths
are in one unit, steps or samples, which a plug-in need not know.
"""

from tokamake.schedules._schedule import Schedule

__all__ = ["Schedule"]
