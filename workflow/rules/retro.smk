# Objective retro: chunks of documents, their vectors and index, and neighbors of the samples' chunks.

if retro_rules.names:
    CHUNKS, NEIGHBORS = DATA_SET.chunks, f"{RUN}/neighbors"

    wildcard_constraints:
        dataset="|".join(map(re.escape, CONFIG.merged)),
        chunk_length="|".join(retro_rules.chunk_lengths),
        embedder="|".join(map(re.escape, retro_rules.embedders)),
        split="|".join(map(re.escape, retro_rules.splits)),

    rule chunk_documents:
        "Number the chunks of the documents of a dataset."
        input:
            merged=retro_rules.merged_file,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            multiext(f"{CHUNKS}/{{chunk_length}}/{{dataset}}", ".json", ".npy"),
        log:
            f"{DATA_SET.logs}/chunk_documents/{{chunk_length}}/{{dataset}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/chunk_documents/{{chunk_length}}/{{dataset}}.tsv"
        conda:
            ENVIRONMENT
        params:
            prefix=retro_rules.prefix,
        shell:
            "tokamake chunk-documents {params.prefix:q} --tokenizer {input.tokenizer[0]:q}"
            " --chunk-length {wildcards.chunk_length:q} --output {output[0]:q} > {log:q} 2>&1"

    rule embed_chunks:
        "Embed the chunks of a dataset, unless they are unchanged."
        input:
            merged=retro_rules.merged_file,
            chunks=rules.chunk_documents.output[0],
            model=retro_rules.embedder_files,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            # Vectors are no outputs: Snakemake would delete them, also if only other datasets changed.
            touch(f"{CHUNKS}/{{chunk_length}}/{{embedder}}/{{dataset}}.done"),
        log:
            f"{DATA_SET.logs}/embed_chunks/{{chunk_length}}/{{embedder}}/{{dataset}}.log",
        benchmark:
            f"{DATA_SET.benchmarks}/embed_chunks/{{chunk_length}}/{{embedder}}/{{dataset}}.tsv"
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            prefix=retro_rules.prefix,
            model=retro_rules.embedder_options,
            batch_size=retro_rules.batch_size,
            vectors=retro_rules.vectors,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake embed-chunks {params.prefix:q} --chunks {input.chunks:q} {params.model:q}"
            " --tokenizer {input.tokenizer[0]:q} --batch-size {params.batch_size:q}"
            " --output {params.vectors:q}/0.json > {log:q} 2>&1"

    rule index_chunks:
        "Build an index of FAISS for the chunks of the documents that a run is trained on."
        input:
            index=f"{RUN}/index/index.json",
            chunks=retro_rules.tables,
            vectors=retro_rules.embedded,
        output:
            multiext(f"{NEIGHBORS}/chunks", ".json", ".npy", ".faiss"),
        log:
            "logs/{run}/index_chunks.log",
        benchmark:
            "results/benchmarks/{run}/index_chunks.tsv"
        conda:
            ENVIRONMENT
        threads: 4
        params:
            checked=preflight.index_chunks,
            index=subpath(input.index, parent=True),
            chunks=retro_rules.table_folder,
            vectors=retro_rules.vector_folder,
            options=retro_rules.index_options,
        shell:
            "tokamake index-chunks {params.index:q} --chunks {params.chunks:q}"
            " --embeddings {params.vectors:q} {params.options:q} --workers {threads}"
            " --output {output[0]:q} > {log:q} 2>&1"

    rule embed_samples:
        "Embed the chunks of the samples of a split from a dataset, unless they are unchanged."
        input:
            index=f"{RUN}/index/index.json",
            merged=retro_rules.merged_file,
            model=retro_rules.embedder_files,
            tokenizer=CONFIG.run_tokenizer_files,
        output:
            # As of embed_chunks.
            touch(f"{NEIGHBORS}/asked/{{split}}/{{dataset}}.done"),
        log:
            "logs/{run}/embed_samples/{split}/{dataset}.log",
        benchmark:
            "results/benchmarks/{run}/embed_samples/{split}/{dataset}.tsv"
        conda:
            ENVIRONMENT
        threads: 2
        resources:
            nodes=1,
            tasks=1,
        params:
            index=subpath(input.index, parent=True),
            data_root=DATA,
            model=retro_rules.embedder_options,
            batch_size=retro_rules.batch_size,
            vectors=retro_rules.asked,
        shell:
            "{resources.launch} {resources.nodes} {resources.tasks}"
            " tokamake embed-samples {params.index:q} --data-root {params.data_root:q}"
            " --split {wildcards.split:q} --dataset {wildcards.dataset:q} {params.model:q}"
            " --tokenizer {input.tokenizer[0]:q} --batch-size {params.batch_size:q}"
            " --output {params.vectors:q}/0.json > {log:q} 2>&1"

    rule find_neighbors:
        "Find the chunks that are most similar to each chunk of the samples."
        input:
            index=f"{RUN}/index/index.json",
            chunks=rules.index_chunks.output[0],
            vectors=rules.embed_samples.output[0],
        output:
            multiext(f"{NEIGHBORS}/{{split}}/{{dataset}}", ".json", ".npy"),
        log:
            "logs/{run}/find_neighbors/{split}/{dataset}.log",
        benchmark:
            "results/benchmarks/{run}/find_neighbors/{split}/{dataset}.tsv"
        conda:
            ENVIRONMENT
        threads: 4
        params:
            index=subpath(input.index, parent=True),
            data_root=DATA,
            vectors=retro_rules.asked,
            options=retro_rules.search_options,
        shell:
            "tokamake find-neighbors {params.index:q} --data-root {params.data_root:q}"
            " --split {wildcards.split:q} --dataset {wildcards.dataset:q}"
            " --queries {params.vectors:q} --chunks {input.chunks:q} {params.options:q}"
            " --workers {threads} --output {output[0]:q} > {log:q} 2>&1"
