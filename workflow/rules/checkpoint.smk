# Initial checkpoints of any format, and exports of trained models.


if checkpoint_rules.addresses:

    rule fetch_weights:
        "Download a file of the weights of a model on the Hugging Face Hub."
        output:
            "{weights}",
        log:
            "logs/fetch_weights/{weights}.log",
        benchmark:
            "results/benchmarks/fetch_weights/{weights}.tsv"
        wildcard_constraints:
            weights="|".join(map(re.escape, checkpoint_rules.addresses)),
        localrule: True  # compute nodes have no network
        conda:
            ENVIRONMENT
        params:
            address=lambda wildcards: checkpoint_rules.addresses[wildcards.weights],
        shell:
            "tokamake fetch {params.address:q} > {log:q} 2>&1"


rule import_checkpoint:
    "Convert an initial checkpoint of any format to the native format."
    input:
        lambda wildcards: checkpoint_rules.files[wildcards.start],
    output:
        directory("results/import/{start}"),
    log:
        "logs/import_checkpoint/{start}.log",
    benchmark:
        "results/benchmarks/import_checkpoint/{start}.tsv"
    conda:
        ENVIRONMENT
    threads: 4
    params:
        checkpoint=lambda wildcards: checkpoint_rules.starts[wildcards.start],
    shell:
        "tokamake convert --from {params.checkpoint:q} --to {output:q} --format native"
        " --workers {threads} > {log:q} 2>&1"


rule convert:
    "Write the trained model in another format and layout, which the folder's name states."
    input:
        train=f"{RUN}/train.json",
        tokenizer=CONFIG.run_tokenizer_files,
    output:
        directory(f"{RUN}/convert/{{form}}"),
    log:
        "logs/{run}/convert/{form}.log",
    benchmark:
        "results/benchmarks/{run}/convert/{form}.tsv"
    conda:
        ENVIRONMENT
    threads: 4
    params:
        checkpoint=subpath(input.train, parent=True),
        form=checkpoint_rules.export_options,
    shell:
        "tokamake convert --from {params.checkpoint:q}/training --to {output:q} {params.form:q}"
        " --workers {threads} > {log:q} 2>&1"


rule model_card:
    "Write the model card: data, training, loss and use of the trained model."
    input:
        config=f"{RUN}/run.yaml",
        train=f"{RUN}/train.json",
        metadata=DATA_SET.metadata,
        index=f"{RUN}/index/index.json",
        recall=retrieval_rules.card_inputs,
    output:
        f"{RUN}/model_card.md",
    log:
        "logs/{run}/model_card.log",
    benchmark:
        "results/benchmarks/{run}/model_card.tsv"
    localrule: True  # it takes no time, and the export waits for it
    conda:
        ENVIRONMENT
    params:
        options=retrieval_rules.card_options(checkpoint_rules.card_options),
        index=subpath(input.index, parent=True),
    shell:
        "tokamake model-card --config {input.config:q} --train {input.train:q}"
        " --metadata {input.metadata:q} --index {params.index:q} {params.options:q} --output {output:q}"
        " > {log:q} 2>&1"


rule export_hf:
    "Convert the trained checkpoint to Hugging Face's format, with its tokenizer."
    input:
        train=f"{RUN}/train.json",
        card=f"{RUN}/model_card.md",
        tokenizer=CONFIG.run_tokenizer_files,
    output:
        directory(f"{RUN}/export"),  # A large model's weights are in several files.
    log:
        "logs/{run}/export_hf.log",
    benchmark:
        "results/benchmarks/{run}/export_hf.tsv"
    conda:
        ENVIRONMENT
    threads: 4
    params:
        checkpoint=subpath(input.train, parent=True),
        generation=checkpoint_rules.generation_options,
    shell:
        "tokamake convert --from {params.checkpoint:q}/training --to {output:q} --format hf"
        " --tokenizer {input.tokenizer[0]:q} {params.generation:q} --model-card {input.card:q}"
        " --compare-logits --workers {threads} > {log:q} 2>&1"


rule push:
    "Upload the exported model to the Hugging Face Hub."
    input:
        f"{RUN}/export",
    output:
        f"{RUN}/push.json",
    log:
        "logs/{run}/push.log",
    benchmark:
        "results/benchmarks/{run}/push.tsv"
    localrule: True  # compute nodes have no network
    conda:
        ENVIRONMENT
    params:
        address=run_settings.value("export.push"),
        options=run_settings.options("export", only=("private",)),
    shell:
        "tokamake push {input:q} {params.address:q} {params.options:q} --output {output:q} > {log:q} 2>&1"
