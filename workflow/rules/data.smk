# Raw text to weighted, merged pairs of tokens and the sample index of a run.

if CONFIG.sample_corpus:

    rule sample_corpus:
        "Harvest small corpora of real text from the Python standard library."
        output:
            list(DECLARED),
        log:
            "logs/sample_corpus.log",
        benchmark:
            "results/benchmarks/sample_corpus.tsv"
        conda:
            "../envs/tokamake.yaml"
        params:
            settings=settings("sample_corpus"),
        shell:
            "tokamake sample-corpus --settings {params.settings:q} --output results/raw > {log} 2>&1"


if GIVEN_TOKENIZER is None:

    rule train_tokenizer:
        "Train a tokenizer on the raw corpora."
        input:
            declared_files(path for source in PLAN.tokenizer for path in source.files),
        output:
            TOKENIZER_FILES,
        log:
            "logs/train_tokenizer.log",
        benchmark:
            "results/benchmarks/train_tokenizer.tsv"
        conda:
            "../envs/tokamake.yaml"
        params:
            corpora=PLAN.tokenizer_stamp,
            kind=CONFIG.tokenizer.kind,
            vocab_size=CONFIG.tokenizer.vocab_size,
            train_bytes=CONFIG.tokenizer.train_bytes,
            special_tokens=[f"--special-tokens={text}" for text in CONFIG.tokenizer.special_tokens],
            # What is made of the output's name is no reason to train again, and this is none.
            on_bad_document=lambda wildcards, output: CONFIG.tokenize.on_bad_document,
            folder=subpath(output[0], parent=True),
            plan=PLAN_FILE,
        shell:
            "tokamake train-tokenizer --plan {params.plan} --kind {params.kind}"
            " --vocab-size {params.vocab_size} --train-bytes {params.train_bytes}"
            " {params.special_tokens:q}"
            " --on-bad-document {params.on_bad_document} --output {params.folder} > {log} 2>&1"


if CONFIG.tokenize.deduplicate:

    rule hash_documents:
        "Hash each document of a batch of shards, so that equal ones can be found."
        input:
            raw_inputs,
        output:
            f"{DATA}/hashes/{{batch}}.rows",
        log:
            "logs/hash_documents/{batch}.log",
        benchmark:
            "results/benchmarks/hash_documents/{batch}.tsv"
        conda:
            "../envs/tokamake.yaml"
        params:
            shards=shards_stamp,
            corpus=corpus_options,
            plan=PLAN_FILE,
        shell:
            "tokamake hash-documents --plan {params.plan} --batch {wildcards.batch}"
            " {params.corpus:q} --output {output} > {log} 2>&1"

    rule find_duplicates:
        "Find the documents of a corpus whose text has come before in it."
        input:
            corpus_hashes,
        output:
            f"{DATA}/duplicates/{{corpus}}.rows",
        log:
            "logs/find_duplicates/{corpus}.log",
        benchmark:
            "results/benchmarks/find_duplicates/{corpus}.tsv"
        conda:
            "../envs/tokamake.yaml"
        shell:
            "tokamake find-duplicates {input:q} --output {output} > {log} 2>&1"


rule tokenize:
    "Turn raw files into .bin/.idx pairs of tokens, those of a batch of shards in one job."
    input:
        raw=tokenize_inputs,
        tokenizer=TOKENIZER_FILES,
        duplicates=corpus_duplicates,
    output:
        batch_file("tokenize", "{batch}"),
    log:
        "logs/tokenize/{batch}.log",
    benchmark:
        "results/benchmarks/tokenize/{batch}.tsv"
    conda:
        "../envs/tokamake.yaml"
    threads: 1
    params:
        shards=shards_stamp,
        corpus=corpus_options,
        duplicates=lambda wildcards, input: [f"--duplicates={path}" for path in input.duplicates],
        options=options(CONFIG.tokenize, leave_out=("deduplicate",)),
        plan=PLAN_FILE,
        folder=f"{DATA}/shards",
    shell:
        "tokamake tokenize --plan {params.plan} --batch {wildcards.batch} --output {params.folder}"
        " --summary {output} --tokenizer {input.tokenizer[0]:q} {params.corpus:q}"
        " {params.duplicates:q} {params.options:q} --workers {threads} > {log} 2>&1"


rule merge:
    "Put shards together, verifying each: the merged pairs of a batch in one job."
    input:
        merge_inputs,
    output:
        batch_file("merge", "{batch}"),
    log:
        "logs/merge/{batch}.log",
    benchmark:
        "results/benchmarks/merge/{batch}.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        pairs=merged_stamp,
        plan=PLAN_FILE,
        shards=f"{DATA}/shards",
        folder=f"{DATA}/merged",
    shell:
        "tokamake merge --plan {params.plan} --batch {wildcards.batch} --input {params.shards}"
        " --output {params.folder} --summary {output} > {log} 2>&1"


rule describe:
    "Write the metadata of every merged file, and of all of them."
    input:
        MERGE_FILES,
    output:
        f"{DATA}/metadata.json",
    log:
        "logs/describe.log",
    benchmark:
        "results/benchmarks/describe.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        pairs=files.digest(list(MERGED)),
        plan=PLAN_FILE,
        folder=f"{DATA}/merged",
    shell:
        "tokamake describe --plan {params.plan} --input {params.folder} --output {output}"
        " > {log} 2>&1"


rule weigh:
    "Write the weighting file of a run: weight, prefix and corpus of every merged file."
    input:
        metadata=f"{DATA}/metadata.json",
        corpora=setting("corpora"),
    output:
        weights=WEIGHTS,
        held_out=[set_file(name) for name in SETS],
    log:
        "logs/{run}/weigh.log",
    benchmark:
        "results/benchmarks/{run}/weigh.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        corpora=corpora_options,
        length=length_options,
    shell:
        "tokamake weigh {params.corpora:q} --metadata {input.metadata}"
        " --output {output.weights} {params.length:q} > {log} 2>&1"


rule index:
    "Build the run's document, sample and shuffle indexes and its blend."
    input:
        weights=WEIGHTS,
        held_out=[set_file(name) for name in SETS],
        merged=MERGE_FILES,
    output:
        f"{RUN}/index/index.json",
    log:
        "logs/{run}/index.log",
    benchmark:
        "results/benchmarks/{run}/index.tsv"
    conda:
        "../envs/tokamake.yaml"
    params:
        samples=sample_options,
        held_out=lambda wildcards, input: [
            f"--held-out={name}={path}" for name, path in zip(SETS, input.held_out, strict=True)
        ],
        options=lambda wildcards: options(RUNS[wildcards.run].train, only=INDEX_SETTINGS),
        seed=setting("seed"),
        data_root=subpath(input.weights, parent=True),
        folder=subpath(output[0], parent=True),
    shell:
        "tokamake index --weights {input.weights} --data-root {params.data_root}"
        " --output {params.folder} {params.samples:q} {params.held_out:q} {params.options:q}"
        " --seed {params.seed} > {log} 2>&1"


rule data:
    "Build all data: tokenized, merged, described and weighted."
    input:
        rules.describe.output,
        expand(rules.weigh.output, run=RUNS),
