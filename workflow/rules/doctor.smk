# Checks that ranks can work together on a profile's nodes, before the first training there.


rule doctor:
    "Let all ranks meet, compare their hosts and measure their communication."
    output:
        f"{DOCTOR}/{{place}}.json",
    log:
        "logs/doctor/{place}.log",
    benchmark:
        "results/benchmarks/doctor/{place}.tsv"
    priority: 100
    retries: 0  # a person waits for its report
    conda:
        ENVIRONMENT
    resources:
        nodes=1,
        tasks=1,
    shell:
        "{resources.launch} {resources.nodes} {resources.tasks}"
        " tokamake doctor --ranks --output {output:q} > {log:q} 2>&1"
