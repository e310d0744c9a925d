# Search with biencoders: embeddings, an index, what questions find, and recall beside BM25's.

if CONFIG.shared.retrieval:
    RETRIEVAL = f"{RUN}/retrieval"
    EMBEDDED = "|".join(map(re.escape, retrieval_rules.names)) or "(?!)"
    SHARD = (".json", ".npy", ".ids.npy")
    FOUND = (".json", ".queries.npy", ".ids.npy", ".scores.npy")

    wildcard_constraints:
        searched="|".join(map(re.escape, retrieval_rules.folders)),
        questions="|".join(map(re.escape, retrieval_rules.settings.questions)) or "(?!)",
        shard="[^/]+",


if CONFIG.shared.retrieval and retrieval_rules.settings.passages:

    rule embed_passages:
        "Embed the passages of a file, or of a byte range of it."
        input:
            passages=retrieval_rules.passage_file,
            model=retrieval_rules.model_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            multiext(f"{RETRIEVAL}/embeddings/{{shard}}", *SHARD),
        log:
            "logs/{run}/embed_passages/{shard}.log",
        benchmark:
            "results/benchmarks/{run}/embed_passages/{shard}.tsv"
        wildcard_constraints:
            run=EMBEDDED,
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            model=retrieval_rules.model,
            sequence_length=retrieval_rules.sequence_length,
            batch_size=retrieval_rules.batch_size,
            byte_range=retrieval_rules.byte_range_options,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake embed-passages {input.passages:q} {params.byte_range:q} --checkpoint {params.model:q}"
            " --tokenizer {input.tokenizer[0]:q} --sequence-length {params.sequence_length:q}"
            " --batch-size {params.batch_size:q} --output {output[0]:q} > {log:q} 2>&1"

    rule embed_questions:
        "Embed the questions of a file."
        input:
            questions=retrieval_rules.question_file,
            model=retrieval_rules.model_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            multiext(f"{RETRIEVAL}/questions/{{questions}}/vectors", *SHARD),
        log:
            "logs/{run}/embed_questions/{questions}.log",
        benchmark:
            "results/benchmarks/{run}/embed_questions/{questions}.tsv"
        wildcard_constraints:
            run=EMBEDDED,
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            model=retrieval_rules.model,
            sequence_length=retrieval_rules.sequence_length,
            batch_size=retrieval_rules.batch_size,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake embed-questions {input.questions:q} --checkpoint {params.model:q}"
            " --tokenizer {input.tokenizer[0]:q} --sequence-length {params.sequence_length:q}"
            " --batch-size {params.batch_size:q} --output {output[0]:q} > {log:q} 2>&1"

    rule search:
        "Find the passages whose vectors are most similar to the vector of each question."
        input:
            shards=retrieval_rules.shards,
            queries=rules.embed_questions.output[0],
            index=retrieval_rules.index_file,
        output:
            multiext(f"{RETRIEVAL}/found/{{questions}}", *FOUND),
        log:
            "logs/{run}/search/{questions}.log",
        benchmark:
            "results/benchmarks/{run}/search/{questions}.tsv"
        wildcard_constraints:
            run=EMBEDDED,
        conda:
            ENVIRONMENT
        threads: 4
        params:
            queries=subpath(input.queries, parent=True),
            embeddings=retrieval_rules.embeddings,
            shards=retrieval_rules.shard_options,
            options=retrieval_rules.search_options,
            top_k=retrieval_rules.settings.top_k,
        shell:
            "OMP_NUM_THREADS={threads} tokamake search --queries {params.queries:q}"
            " --embeddings {params.embeddings:q} {params.shards:q} {params.options:q}"
            " --top-k {params.top_k:q} --workers {threads} --output {output[0]:q} > {log:q} 2>&1"

    rule evaluate_retrieval:
        "Measure how often an answer is in the passages that the questions found."
        input:
            found="{searched}/found/{questions}.json",
            questions=retrieval_rules.question_file,
            passages=retrieval_rules.passage_files,
        output:
            multiext("{searched}/recall/{questions}", ".json", ".questions.jsonl"),
        log:
            "logs/evaluate_retrieval/{searched}/{questions}.log",
        benchmark:
            "results/benchmarks/evaluate_retrieval/{searched}/{questions}.tsv"
        conda:
            ENVIRONMENT
        params:
            passages=lambda wildcards, input: [f"--passages={path}" for path in input.passages],
            match=retrieval_rules.settings.match,
        shell:
            "tokamake evaluate-retrieval {input.found:q} --questions {input.questions:q}"
            " {params.passages:q} --match {params.match:q} --output {output[0]:q} > {log:q} 2>&1"


if CONFIG.shared.retrieval and retrieval_rules.settings.passages and retrieval_rules.settings.bm25:

    rule search_bm25:
        "Find the passages that share words with each question, as a baseline."
        input:
            questions=retrieval_rules.question_file,
            passages=retrieval_rules.passage_files,
        output:
            multiext(f"{DATA_SET.bm25}/found/{{questions}}", *FOUND),
        log:
            f"{DATA_SET.logs}/search_bm25/{{questions}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/search_bm25/{{questions}}.tsv"
        conda:
            ENVIRONMENT
        params:
            checked=preflight.search_bm25,
            passages=lambda wildcards, input: [f"--passages={path}" for path in input.passages],
            top_k=retrieval_rules.settings.top_k,
        shell:
            "tokamake search-bm25 --questions {input.questions:q} {params.passages:q}"
            " --top-k {params.top_k:q} --output {output[0]:q} > {log:q} 2>&1"


if CONFIG.shared.retrieval and not retrieval_rules.settings.passages:

    rule embed_blocks:
        "Embed the blocks of a dataset of the run."
        input:
            data=retrieval_rules.merged_files,
            model=retrieval_rules.model_inputs,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            multiext(f"{RETRIEVAL}/embeddings/{{shard}}", *SHARD),
        log:
            "logs/{run}/embed_blocks/{shard}.log",
        benchmark:
            "results/benchmarks/{run}/embed_blocks/{shard}.tsv"
        wildcard_constraints:
            run=EMBEDDED,
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            prefix=retrieval_rules.prefix,
            model=retrieval_rules.model,
            number=retrieval_rules.number,
            sequence_length=retrieval_rules.sequence_length,
            batch_size=retrieval_rules.batch_size,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake embed-blocks {params.prefix:q} --checkpoint {params.model:q}"
            " --tokenizer {input.tokenizer[0]:q} --sequence-length {params.sequence_length:q}"
            " --batch-size {params.batch_size:q} --number {params.number:q}"
            " --output {output[0]:q} > {log:q} 2>&1"


if CONFIG.shared.retrieval and retrieval_rules.settings.index:

    rule index_blocks:
        "Build an index of FAISS for the embeddings of a run."
        input:
            retrieval_rules.shards,
        output:
            multiext(f"{RETRIEVAL}/index", ".json", ".faiss"),
        log:
            "logs/{run}/index_blocks.log",
        benchmark:
            "results/benchmarks/{run}/index_blocks.tsv"
        wildcard_constraints:
            run=EMBEDDED,
        conda:
            ENVIRONMENT
        threads: 4
        params:
            checked=preflight.index_blocks,
            embeddings=retrieval_rules.embeddings,
            shards=retrieval_rules.shard_options,
            options=retrieval_rules.index_options,
        shell:
            "tokamake index-blocks {params.embeddings:q} {params.shards:q} {params.options:q}"
            " --workers {threads} --output {output[0]:q} > {log:q} 2>&1"
