"""Learning-rate schedules, one file each; the trainer uses them through `_schedule.Schedule`.

A plug-in has SETTINGS, the settings of the section `schedule` that it uses with their published
values (see `config/plugin_settings.py`), and a function `factor`, which returns the share of the
peak learning rate after warm-up. Its position and lengths have the same unit, steps or samples; its
own settings are arguments, too.
"""
