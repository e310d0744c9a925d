"""May it run? The checks that decide; the dry run and jobs call the same functions.

| module | facts |
|---|---|
| `model`, `layout` | settings, architecture; ranks and device |
| `data` | settings, tables; index.json, headers of datasets |
| `packages` | settings, this Python environment |
| `initial_models`, `initial_checkpoint`, `initial_schedule` | settings; headers of a checkpoint |
| `finetune` | settings, files of the task, the pretrained model |
| `changes`, `planned_changes` | a run and its newest checkpoint |
| `replaced_data` | the plan, data on disk |
| `run` | all of them for a resolved run |

`planned` has the facts of the dry run. Checks of back ends are in `train/backends/checks`.
"""
