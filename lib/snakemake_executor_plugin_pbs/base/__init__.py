"""The base of the executors of all batch systems.

`executor` adds Snakemake's jobs to `tracker`, which runs the commands of the batch system
(`commands`) and keeps records on disk (`records`). A step of the tracker: `polling` asks the batch
system, `recovery` handles jobs of earlier controllers, `outcome` decides how jobs ended and
`resubmission` whether a failed one is submitted again, `submission` submits ready jobs. `evidence`
interprets the answers.
"""
