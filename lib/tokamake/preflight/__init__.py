"""May it run? The checks that decide; the dry run and jobs call the same functions.

Facts of `model`: settings, architecture; of `data`: settings, tables, index.json, headers of
datasets; of `run`: a resolved run, its Python environment, ranks, device; of `initial_models`,
`initial_checkpoint`: settings, headers of a checkpoint; of `finetune`: files of the task, the
pretrained model; of `changes`, `planned_changes`: a run, its newest checkpoint, data on disk.

`planned` has the facts of the dry run, `run_record` identifies a run. Checks of back ends are in
`train/backends/checks`.
"""
