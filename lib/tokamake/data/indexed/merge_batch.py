"""Stage `merge-batch`: verify shards and merge them into the merged datasets of a job batch."""

from pathlib import Path


def merge_batch(*, plan: Path, batch: str, input: Path, output: Path, summary: Path) -> None:
    """Merge shards into the merged datasets of a job batch; datasets that are complete are kept.

    Args:
        plan: plan.json of the workflow.
        batch: name of a batch of merged datasets in the plan.
        input: folder of shards.
        output: folder of merged datasets.
        summary: batch file, written when all merged datasets of the batch are complete.

    Raises:
        UserError: a shard is missing, is damaged, or was made with another tokenizer.
    """
    # These modules import numpy, and `--help` should be instant.
    from tokamake.data.corpus.plan_file import PlannedMerge, batch_merged, shard_prefixes
    from tokamake.data.indexed import job_batch
    from tokamake.data.indexed.manifest import read_manifest
    from tokamake.data.indexed.merged_dataset import merged_manifest, open_inputs, write_merged
    from tokamake.files import digest

    def make(group: PlannedMerge) -> None:
        prefixes = shard_prefixes(group, input)
        # Everything that determines a merged dataset is in its manifest.
        manifests = [read_manifest(prefix) for prefix in prefixes]
        request = digest(merged_manifest(prefixes, manifests, corpus=group.corpus))
        if job_batch.finished([output / group.name], request):
            print(f"{output / group.name}: is already complete")
        else:
            inputs, dtype = open_inputs(prefixes)
            write_merged(
                inputs, output / group.name, corpus=group.corpus, dtype=dtype, request=request
            )

    groups = batch_merged(plan, batch)
    job_batch.make_each(groups, make)
    job_batch.write_batch(
        summary, batch, folder=output, prefixes=[output / group.name for group in groups]
    )
