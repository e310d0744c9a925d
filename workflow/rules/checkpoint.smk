# What training starts from, a checkpoint of any format or random weights, and what comes of it.
CONVERTED = [f"results/{run}/convert/{form}" for run in RUNS for form in RUNS[run].convert]


wildcard_constraints:
    start="|".join(map(re.escape, STARTS)),
    form=r"[^/]+",


rule init_model:
    "Make a Hugging Face checkpoint with random weights, offline."
    input:
        architecture=setting("model.architecture"),
        tokenizer=TOKENIZER_FILES,
    output:
        expand(f"{RUN}/init/{{file}}", file=HF_FILES, allow_missing=True),
    log:
        "logs/{run}/init_model.log",
    benchmark:
        "results/benchmarks/{run}/init_model.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        seed=setting("seed"),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake init-model --architecture {input.architecture:q}"
        " --tokenizer {input.tokenizer[0]:q} --seed {params.seed} --output {params.folder}"
        " > {log} 2>&1"


rule import_checkpoint:
    "Convert a checkpoint that training starts from, of whatever format, to tokamake's own."
    input:
        lambda wildcards: START_FILES[wildcards.start],
    output:
        directory("results/import/{start}"),
    log:
        "logs/import_checkpoint/{start}.log",
    benchmark:
        "results/benchmarks/import_checkpoint/{start}.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 4
    params:
        checkpoint=lambda wildcards: STARTS[wildcards.start],
    shell:
        "tokamake convert --from {params.checkpoint:q} --to {output:q} --format native"
        " --workers {threads} > {log} 2>&1"


rule convert:
    "Write the trained model in another format and layout, which its name tells."
    input:
        train=f"{RUN}/train.json",
        tokenizer=TOKENIZER_FILES,
    output:
        directory(f"{RUN}/convert/{{form}}"),
    log:
        "logs/{run}/convert/{form}.log",
    benchmark:
        "results/benchmarks/{run}/convert/{form}.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 4
    params:
        checkpoint=subpath(input.train, parent=True),
        form=form_options,
    shell:
        "tokamake convert --from {params.checkpoint}/training --to {output} {params.form:q}"
        " --workers {threads} > {log} 2>&1"


rule export_hf:
    "Convert the trained checkpoint to Hugging Face's layout, with its tokenizer."
    input:
        train=f"{RUN}/train.json",
        tokenizer=TOKENIZER_FILES,
    output:
        directory(f"{RUN}/export"),  # A large model's weights are in several files.
    log:
        "logs/{run}/export_hf.log",
    benchmark:
        "results/benchmarks/{run}/export_hf.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 4
    params:
        checkpoint=subpath(input.train, parent=True),
    shell:
        "tokamake convert --from {params.checkpoint}/training --to {output} --format hf"
        " --tokenizer {input.tokenizer[0]:q} --workers {threads} > {log} 2>&1"
