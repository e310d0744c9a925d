# Hugging Face checkpoints in and out of Megatron-DeepSpeed's layout.

HF_SOURCE = str(CONFIG.model.checkpoint or f"{RUN}/init")
HF_FILES = ("config.json", "model.safetensors")

if CONFIG.model.checkpoint is None:

    rule init_model:
        "Make a Hugging Face checkpoint with random weights, offline."
        input:
            architecture=CONFIG.model.architecture,
            tokenizer=TOKENIZER_FILES,
        output:
            expand(f"{RUN}/init/{{file}}", file=HF_FILES),
        log:
            "logs/init_model.log",
        benchmark:
            "results/benchmarks/init_model.tsv"
        params:
            seed=CONFIG.seed,
        shell:
            "tokamake init-model --architecture {input.architecture} --tokenizer {TOKENIZER}"
            " --seed {params.seed} --output {RUN}/init > {log} 2>&1"


rule import_hf:
    "Convert a Hugging Face checkpoint to Megatron-DeepSpeed's layout."
    input:
        (
            expand(f"{HF_SOURCE}/{{file}}", file=HF_FILES)
            if CONFIG.model.checkpoint is None
            else sorted(
                str(path)
                for path in CONFIG.model.checkpoint.iterdir()
                if path.suffix in (".json", ".safetensors")
            )
        ),
    output:
        f"{RUN}/import/latest",
    log:
        "logs/import_hf.log",
    benchmark:
        "results/benchmarks/import_hf.tsv"
    shell:
        "tokamake import-hf --checkpoint {HF_SOURCE} --output {RUN}/import > {log} 2>&1"


rule export_hf:
    "Convert the trained checkpoint to Hugging Face's layout, with its tokenizer."
    input:
        train=f"{RUN}/train.json",
        tokenizer=TOKENIZER_FILES,
    output:
        expand(f"{RUN}/export/{{file}}", file=HF_FILES),
    log:
        "logs/export_hf.log",
    benchmark:
        "results/benchmarks/export_hf.tsv"
    shell:
        "tokamake export-hf --checkpoint {RUN}/training --tokenizer {TOKENIZER}"
        " --output {RUN}/export > {log} 2>&1"
