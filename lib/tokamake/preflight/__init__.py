"""May it run? The checks that decide; the dry run and jobs call the same functions.

Facts of `model`, `layout`: settings, architecture, ranks, device; of `data`: settings, tables,
index.json, headers of datasets; of `packages`: settings, the Python environment; of
`initial_models`, `initial_checkpoint`, `initial_schedule`: settings, headers of a checkpoint; of
`finetune`: files of the task, the pretrained model; of `changes`, `planned_changes`: a run and its
newest checkpoint; of `replaced_data`: the plan and the data on disk. `run` has them all.

`planned` has the facts of the dry run. Checks of back ends are in `train/backends/checks`.
"""
