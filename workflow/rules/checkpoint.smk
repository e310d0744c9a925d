# What training starts from, a checkpoint of any format or random weights, and what comes of it.

HF_FILES = ("config.json", "model.safetensors")
CHECKPOINT = str(CONFIG.model.checkpoint or f"{RUN}/init")
CHECKPOINT_FILES = expand(f"{RUN}/init/{{file}}", file=HF_FILES)
if CONFIG.model.checkpoint is not None:
    CHECKPOINT_FILES = list(map(str, start_files(CONFIG.model.checkpoint)))

# Training reads tokamake's own checkpoints where they are.
START, START_FILES = f"{RUN}/import", [f"{RUN}/import"]
if is_native(Path(CHECKPOINT)):
    START, START_FILES = CHECKPOINT, CHECKPOINT_FILES

if CONFIG.model.checkpoint is None:

    rule init_model:
        "Make a Hugging Face checkpoint with random weights, offline."
        input:
            architecture=CONFIG.model.architecture,
            tokenizer=TOKENIZER_FILES,
        output:
            CHECKPOINT_FILES,
        log:
            f"logs/{CONFIG.run}/init_model.log",
        benchmark:
            f"results/benchmarks/{CONFIG.run}/init_model.tsv"
        conda:
            "../envs/tokamake.yaml"
        params:
            seed=CONFIG.seed,
            folder=subpath(output[0], parent=True),
        shell:
            "tokamake init-model --architecture {input.architecture:q}"
            " --tokenizer {input.tokenizer[0]:q} --seed {params.seed} --output {params.folder}"
            " > {log} 2>&1"


rule import_checkpoint:
    "Convert the checkpoint that training starts from, of whatever format, to tokamake's own."
    input:
        CHECKPOINT_FILES,
    output:
        directory(f"{RUN}/import"),
    log:
        f"logs/{CONFIG.run}/import_checkpoint.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/import_checkpoint.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        checkpoint=lambda wildcards: CHECKPOINT,
    shell:
        "tokamake convert --from {params.checkpoint:q} --to {output} --format native"
        " > {log} 2>&1"


rule export_hf:
    "Convert the trained checkpoint to Hugging Face's layout, with its tokenizer."
    input:
        train=f"{RUN}/train.json",
        tokenizer=TOKENIZER_FILES,
    output:
        directory(f"{RUN}/export"),  # A large model's weights are in several files.
    log:
        f"logs/{CONFIG.run}/export_hf.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/export_hf.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        checkpoint=f"{RUN}/training",
    shell:
        "tokamake convert --from {params.checkpoint} --to {output} --format hf"
        " --tokenizer {input.tokenizer[0]:q} > {log} 2>&1"
