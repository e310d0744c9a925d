# Hugging Face checkpoints in and out of Megatron-DeepSpeed's layout.

HF_FILES = ("config.json", "model.safetensors")
HF_SOURCE = expand(f"{RUN}/init/{{file}}", file=HF_FILES)
if CONFIG.model.checkpoint is not None:
    HF_SOURCE = [str(CONFIG.model.checkpoint / "config.json")] + sorted(
        map(str, CONFIG.model.checkpoint.glob("*.safetensors*"))
    )

if CONFIG.model.checkpoint is None:

    rule init_model:
        "Make a Hugging Face checkpoint with random weights, offline."
        input:
            architecture=CONFIG.model.architecture,
            tokenizer=TOKENIZER_FILES,
        output:
            HF_SOURCE,
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


rule import_hf:
    "Convert a Hugging Face checkpoint to Megatron-DeepSpeed's layout."
    input:
        HF_SOURCE,
    output:
        f"{RUN}/import/latest",
    log:
        f"logs/{CONFIG.run}/import_hf.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/import_hf.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        checkpoint=subpath(input[0], parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake import-hf --checkpoint {params.checkpoint:q} --output {params.folder}"
        " > {log} 2>&1"


rule export_hf:
    "Convert the trained checkpoint to Hugging Face's layout, with its tokenizer."
    input:
        train=f"{RUN}/train.json",
        tokenizer=TOKENIZER_FILES,
    output:
        expand(f"{RUN}/export/{{file}}", file=HF_FILES),
    log:
        f"logs/{CONFIG.run}/export_hf.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/export_hf.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        checkpoint=f"{RUN}/training",
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake export-hf --checkpoint {params.checkpoint} --tokenizer {input.tokenizer[0]:q}"
        " --output {params.folder} > {log} 2>&1"
