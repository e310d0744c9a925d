# What the exported model is worth on held-out text, and what it writes.


rule evaluate:
    "Measure perplexity and bits per byte on the held-out documents, after each segment too."
    input:
        model=evaluated_inputs,
        weights=WEIGHTS,
        held_out=[set_file(name) for name in SETS if name == "test"],
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/evaluate{{segment}}.json",
    log:
        "logs/{run}/evaluate{segment}.log",
    benchmark:
        "results/benchmarks/{run}/evaluate{segment}.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    params:
        model=evaluated,
        split=held_out_split,
        split_rule=setting("train.split_rule"),
        held_out=lambda wildcards, input: [f"--held-out=test={path}" for path in input.held_out],
        sequence_length=setting("train.sequence_length"),
        max_tokens=setting("evaluate.max_tokens"),
        data_root=subpath(input.weights, parent=True),
    shell:
        "tokamake evaluate --checkpoint {params.model} --weights {input.weights}"
        " --data-root {params.data_root} --tokenizer {input.tokenizer[0]:q} --split {params.split:q}"
        " --split-rule {params.split_rule} {params.held_out:q}"
        " --sequence-length {params.sequence_length} --max-tokens {params.max_tokens}"
        " --output {output} > {log} 2>&1"


rule generate:
    "Let the exported model continue the config's prompts."
    input:
        model=f"{RUN}/export",
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/samples.json",
    log:
        "logs/{run}/generate.log",
    benchmark:
        "results/benchmarks/{run}/generate.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    params:
        prompts=prompt_options,
        max_new_tokens=setting("generate.max_new_tokens"),
        temperature=setting("generate.temperature"),
        top_k=setting("generate.top_k"),
        seed=setting("seed"),
    shell:
        "tokamake generate --checkpoint {input.model} --tokenizer {input.tokenizer[0]:q}"
        " {params.prompts:q} --max-new-tokens {params.max_new_tokens}"
        " --temperature {params.temperature} --top-k {params.top_k} --seed {params.seed}"
        " --output {output} > {log} 2>&1"
