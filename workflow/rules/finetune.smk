# Encoders that learn a task: runs with the section `finetune`.

if finetune_rules.names:
    FINETUNED = "|".join(map(re.escape, finetune_rules.names))

    rule prepare_finetune:
        "Put the head of a task on a pretrained model, and write every setting of the run."
        input:
            checkpoint=checkpoint_rules.start_inputs,
            data=finetune_rules.data_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            run=f"{RUN}/run.yaml",
            start=directory(f"{RUN}/start"),
        log:
            "logs/{run}/prepare_finetune.log",
        benchmark:
            "results/benchmarks/{run}/prepare_finetune.tsv"
        wildcard_constraints:
            run=FINETUNED,
        conda:
            ENVIRONMENT
        params:
            settings=finetune_rules.settings,
            train=finetune_rules.train_settings,
            seed=run_settings.value("seed"),
            checkpoint=checkpoint_rules.start_options,
            folder=subpath(output.run, parent=True),
        shell:
            "tokamake prepare-finetune --settings {params.settings:q} --train {params.train:q}"
            " --run {wildcards.run:q} --seed {params.seed:q} {params.checkpoint:q}"
            " --tokenizer {input.tokenizer[0]:q} --output-folder {params.folder:q}/training"
            " --start {output.start:q} --output {output.run:q} > {log:q} 2>&1"

    rule finetune:
        "Train a model on its task on all ranks, from the beginning or its last checkpoint."
        input:
            run=f"{RUN}/run.yaml",
            start=f"{RUN}/start",
            data=finetune_rules.data_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            scores=f"{RUN}/finetune.json",
            model=directory(f"{RUN}/finetuned"),
        log:
            "logs/{run}/finetune.log",
        benchmark:
            "results/benchmarks/{run}/finetune.tsv"
        wildcard_constraints:
            run=FINETUNED,
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            checked=preflight.finetune,
        # A signal goes to all processes at once. It must not end the shell while ranks save.
        shell:
            "trap : TERM INT USR1;"
            " {resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake finetune --config {input.run:q} --output {output.scores:q} --model {output.model:q}"
            " 2>&1 | (trap '' TERM INT USR1; exec tee {log:q})"

    rule export_finetuned:
        "Convert the best finetuned checkpoint to Hugging Face's format, with its tokenizer."
        input:
            scores=f"{RUN}/finetune.json",
            model=f"{RUN}/finetuned",
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            directory(f"{RUN}/export"),
        log:
            "logs/{run}/export_finetuned.log",
        benchmark:
            "results/benchmarks/{run}/export_finetuned.tsv"
        wildcard_constraints:
            run=FINETUNED,
        conda:
            ENVIRONMENT
        threads: 4
        shell:
            "tokamake convert --from {input.model:q} --to {output:q} --format hf"
            " --tokenizer {input.tokenizer[0]:q} --workers {threads} > {log:q} 2>&1"

    rule evaluate_finetuned:
        "Score the best finetuned checkpoint on the test sets, or predict their labels."
        input:
            scores=f"{RUN}/finetune.json",
            model=f"{RUN}/finetuned",
            data=finetune_rules.data_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            scores=f"{RUN}/evaluate_finetuned.json",
            predictions=directory(f"{RUN}/predictions"),
        log:
            "logs/{run}/evaluate_finetuned.log",
        benchmark:
            "results/benchmarks/{run}/evaluate_finetuned.tsv"
        wildcard_constraints:
            run=FINETUNED,
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            task=finetune_rules.task,
            options=finetune_rules.evaluation_options,
            sequence_length=run_settings.value("train.sequence_length"),
            batch_size=run_settings.value("train.micro_batch_size"),
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake evaluate-finetuned {params.task:q} --checkpoint {input.model:q}"
            " {params.options:q} --tokenizer {input.tokenizer[0]:q}"
            " --sequence-length {params.sequence_length:q} --batch-size {params.batch_size:q}"
            " --output {output.scores:q} --predictions {output.predictions:q} > {log:q} 2>&1"
