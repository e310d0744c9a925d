"""The stage `prepare-finetune`: from a pretrained checkpoint to a run that `finetune` reads."""

from pathlib import Path


def prepare_finetune(
    *,
    checkpoint: Path,
    architecture: Path | None = None,
    settings: str,
    train: str = "{}",
    run: str,
    seed: int,
    tokenizer: Path,
    output_folder: Path,
    start: Path,
    output: Path,
) -> None:
    """Put the head of a task on a pretrained model, and write all settings of the run.

    Prints a table of the new tensors, which are random, and of the dropped tensors, such as the
    head for masked tokens. Optimizer states and steps of the checkpoint are not used.

    Args:
        checkpoint: Pretrained checkpoint of any format: its folder, or one whose `latest` names it.
        architecture: Architecture of the model before it has the head, a YAML file: a BERT starts
            the towers of a biencoder. By default, the one of the checkpoint.
        settings: The section `finetune` of the config as JSON: task, files, epochs.
        train: Settings of the section `train` as JSON; settings about pretraining have no effect.
        run: Name of the run.
        seed: Seed of the new head, of the order of rows and of dropout.
        tokenizer: Tokenizer of the model.
        output_folder: Folder of the run's checkpoints.
        start: Folder to write, with the weights to start from.
        output: The run.yaml to write.
    """
    from tokamake.checkpoint import writer
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.tensors.checkpoint import Target
    from tokamake.config.finetune import FinetuneSettings
    from tokamake.config.training import TrainSettings
    from tokamake.config_files import parse_json
    from tokamake.finetune.finetune_run import FinetuneRun, write_finetune_run
    from tokamake.finetune.task_head import table, with_task_head
    from tokamake.preflight.finetune import check_files, check_model, check_settings
    from tokamake.preflight.initial_checkpoint import initial_architecture
    from tokamake.runtime.cores import file_workers

    finetune = parse_json(FinetuneSettings, settings, where="finetune")
    train_settings = parse_json(TrainSettings, train, where="train")
    check_settings(train_settings)
    check_files(finetune)
    opened = open_any(checkpoint)
    wanted = initial_architecture(opened.architecture, architecture, source=checkpoint)
    model = with_task_head(opened, finetune.task, seed=seed, wanted=wanted)
    shape = model.checkpoint.architecture
    check_model(train_settings, shape, tokenizer=tokenizer, source=str(checkpoint))
    print(table(model), flush=True)
    writer.write(start, model.checkpoint, "native", Target(), workers=file_workers())
    write_finetune_run(
        output,
        FinetuneRun(
            run=run,
            seed=seed,
            checkpoint=start,
            pretrained=checkpoint,
            new_tensors=model.new,
            dropped_tensors=model.dropped,
            tokenizer=tokenizer,
            output=output_folder,
            architecture=shape,
            train=train_settings,
            finetune=finetune,
        ),
    )
