"""Random ways to share a run over ranks that fit together by construction."""

from typing import Any

from hypothesis import strategies as st

from tests.support.runs import ARCHITECTURE
from tokamake.config.architecture import Architecture
from tokamake.config.parallel import INTERLEAVED

Plan = dict[str, Any]
"""Of a run: settings, architecture, ranks and batches."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Runs whose sizes fit together by construction."""
    tensor, context = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    pipeline, replicas = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    settings: Plan = {
        "tensor_parallel_size": tensor,
        "context_parallel_size": context,
        "pipeline_parallel_size": pipeline,
        "data_parallel_replicate_size": replicas,
        "sequence_parallel": draw(st.booleans()),
        "context_parallel_method": draw(st.sampled_from(["ring", "ulysses"])),
    }
    if pipeline > 1:
        settings |= draw(schedules())
    data = replicas * draw(st.integers(1, 3))
    micro = draw(st.integers(1, 3))
    stages = pipeline * settings.get("virtual_pipeline_size", 1)
    if draw(st.booleans()) and pipeline > 1:
        counts = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
        settings["pipeline_layers"] = tuple(counts)
    layers = sum(settings.get("pipeline_layers", ())) or stages + draw(st.integers(0, 9))
    return {
        "settings": settings,
        "world_size": tensor * context * pipeline * data,
        "data": data,
        "architecture": architecture(draw, tensor * context, layers),
        "sequence_length": 2 * context * tensor * draw(st.integers(1, 9)),
        "micro_batch_size": micro,
        "global_batch_size": micro * data * pipeline * draw(st.integers(1, 4)),
    }


@st.composite
def schedules(draw: st.DrawFn) -> Plan:
    """A schedule of a pipeline, and stages of each rank that it can have."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", *INTERLEAVED]))
    several = 2 if schedule == "zbv" else draw(st.integers(2, 3))
    virtual = several if schedule in INTERLEAVED else 1
    return {"pipeline_schedule": schedule, "virtual_pipeline_size": virtual}


def architecture(draw: st.DrawFn, multiple: int, layers: int) -> Architecture:
    """A model whose heads and widths are multiples of so many."""
    groups = draw(st.sampled_from([1, multiple]))
    heads = multiple * draw(st.integers(1, 3))
    return Architecture(
        **ARCHITECTURE.model_dump()
        | {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "hidden_size": 4 * heads,
            "intermediate_size": multiple * draw(st.integers(1, 9)),
        }
    )
