# What the exported model is worth on held-out text, and what it writes.


rule evaluate:
    "Measure perplexity and bits per byte on the held-out documents."
    input:
        model=rules.export_hf.output,
        weights=f"{DATA}/weights.txt",
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/evaluate.json",
    log:
        "logs/evaluate.log",
    benchmark:
        "results/benchmarks/evaluate.tsv"
    params:
        split=CONFIG.train.split,
        sequence_length=CONFIG.train.sequence_length,
        max_tokens=CONFIG.evaluate.max_tokens,
        batch_size=CONFIG.evaluate.batch_size,
    threads: 2
    shell:
        "tokamake evaluate --checkpoint {RUN}/export --weights {input.weights} --data-root {DATA}"
        " --tokenizer {TOKENIZER} --split {params.split} --sequence-length {params.sequence_length}"
        " --max-tokens {params.max_tokens} --batch-size {params.batch_size} --output {output}"
        " > {log} 2>&1"


rule generate:
    "Let the exported model continue the config's prompts."
    input:
        model=rules.export_hf.output,
        tokenizer=TOKENIZER_FILES,
    output:
        f"{RUN}/samples.json",
    log:
        "logs/generate.log",
    benchmark:
        "results/benchmarks/generate.tsv"
    params:
        prompts=" ".join(f"--prompts={shlex.quote(prompt)}" for prompt in CONFIG.generate.prompts),
        max_new_tokens=CONFIG.generate.max_new_tokens,
        temperature=CONFIG.generate.temperature,
        top_k=CONFIG.generate.top_k,
        seed=CONFIG.seed,
    threads: 2
    shell:
        "tokamake generate --checkpoint {RUN}/export --tokenizer {TOKENIZER} {params.prompts}"
        " --max-new-tokens {params.max_new_tokens} --temperature {params.temperature}"
        " --top-k {params.top_k} --seed {params.seed} --output {output} > {log} 2>&1"
