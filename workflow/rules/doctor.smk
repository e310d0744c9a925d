# Whether ranks can work where a profile sends them, asked before the first training there.


rule doctor:
    "Have all ranks meet, compare their hosts and measure how they talk to each other."
    output:
        f"{DOCTOR}/{{place}}.json",
    log:
        "logs/doctor/{place}.log",
    benchmark:
        "results/benchmarks/doctor/{place}.tsv"
    priority: 100
    retries: 0  # whatever the profile has for others: its words are wanted at once
    conda:
        "../envs/tokamake.yaml"
    resources:
        nodes=1,
        tasks=1,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake doctor --ranks --output {output} > {log} 2>&1"
