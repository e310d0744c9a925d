# What the exported model is worth on held-out text, and what it writes.


rule evaluate:
    "Measure perplexity and bits per byte on the held-out documents."
    input:
        model=f"{RUN}/export",
        weights=f"{DATA}/weights.txt",
        held_out=[set_file(name) for name in SETS if name == "test"],
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/evaluate.json",
    log:
        f"logs/{CONFIG.run}/evaluate.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/evaluate.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    params:
        split=held_out_split,
        split_rule=CONFIG.train.split_rule,
        held_out=lambda wildcards, input: [f"--held-out=test={path}" for path in input.held_out],
        sequence_length=CONFIG.train.sequence_length,
        max_tokens=CONFIG.evaluate.max_tokens,
        data_root=subpath(input.weights, parent=True),
    shell:
        "tokamake evaluate --checkpoint {input.model} --weights {input.weights}"
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
        f"logs/{CONFIG.run}/generate.log",
    benchmark:
        f"results/benchmarks/{CONFIG.run}/generate.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 2
    params:
        prompts=lambda wildcards: [f"--prompts={prompt}" for prompt in CONFIG.generate.prompts],
        max_new_tokens=CONFIG.generate.max_new_tokens,
        temperature=CONFIG.generate.temperature,
        top_k=CONFIG.generate.top_k,
        seed=CONFIG.seed,
    shell:
        "tokamake generate --checkpoint {input.model} --tokenizer {input.tokenizer[0]:q}"
        " {params.prompts:q} --max-new-tokens {params.max_new_tokens}"
        " --temperature {params.temperature} --top-k {params.top_k} --seed {params.seed}"
        " --output {output} > {log} 2>&1"
