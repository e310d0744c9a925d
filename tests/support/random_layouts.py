"""Random layouts of checkpoints in each format, and the ones that are refused."""

import random as chances

from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout

HEADS = "does not divide num_attention_heads 2"
OF_ENCODERS = f"has no pipeline of a (bert|t5|biencoder)|{HEADS}|DeepSpeed itself refuses stages"
PIPELINES = "DeepSpeed itself refuses stages 2 and 3 with pipelines"


def refusal(kind: str, layout: ParallelLayout, begin: Checkpoint) -> str | None:
    """Return the reason for which a layout is refused, or None."""
    has_pipeline = kind == "mds_pipeline" or (kind, layout.pipeline_parallel_size) == (
        "universal",
        2,
    )
    if has_pipeline and not begin.architecture.is_causal:
        return OF_ENCODERS
    if layout.tensor_parallel_size == 4 and kind in HOLD_PARTS:
        return HEADS
    return PIPELINES if kind == "mds_pipeline" and layout.zero_stage > 1 else None


HOLD_STATES = ["native", "universal"]
HOLD_PARTS = ["mds", "mds_pipeline", "megatron"]
HOLD_WEIGHTS = ["hf", *HOLD_PARTS]


def random_layout(random: chances.Random, kind: str, begin: Checkpoint) -> ParallelLayout:
    """Half of those that could share states do; some ranks have nothing but padding then."""
    tensor, stages = random.choice((1, 2, 4)), random.choice((1, 2))
    if kind == "megatron":
        stages = 1 if begin.architecture.several_stacks else stages
        return ParallelLayout(
            tensor, stages, begin.architecture.num_hidden_layers // 2 if stages > 1 else 1
        )
    if kind in ("mds", "mds_pipeline"):
        stages = 1 if kind == "mds" else stages
        ranks, stage = random.choice((1, 3, 6, 24)), random.choice((1, 2, 3))
        return ParallelLayout(tensor, stages, 1, *random.choice([(1, 0), (ranks, stage)]))
    return ParallelLayout(1, stages if kind == "universal" else 1)


def holds_states(kind: str, layout: ParallelLayout) -> bool:
    """Whether a checkpoint written in a format has a run's states."""
    return kind in (*HOLD_STATES, "megatron") or layout.zero_stage > 0
