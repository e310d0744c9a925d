"""Order of queries, keys and values in Megatron's fused tensor, by its checkpoint version."""

from collections.abc import Iterator

from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis, part


def row_order(
    architecture: Architecture, axis: Axis, *, version: float
) -> Iterator[tuple[int, range]]:
    """Rows of query (0), key (1) and value (2) in the order of the fused tensor.

    From version 2 on, each key and value head follows its query heads; version 1 has single
    rows of the three in turn; version 0 has all queries of a rank, then keys, then values.
    """
    shape, head = architecture, architecture.head_dim
    groups = part(shape.num_key_value_heads, axis)
    queries = shape.num_attention_heads // shape.num_key_value_heads * head
    if version >= 2:
        for group in groups:
            yield 0, range(group * queries, (group + 1) * queries)
            for number in (1, 2):
                yield number, range(group * head, (group + 1) * head)
    elif shape.num_attention_heads != shape.num_key_value_heads:
        raise UserError(
            f"checkpoint_version {version}: Megatron had no grouped-query attention in "
            "this version; write the checkpoint again with a newer Megatron"
        )
    elif version >= 1:
        for row in range(groups.start * head, groups.stop * head):
            for number in range(3):
                yield number, range(row, row + 1)
    else:
        for number in range(3):
            yield number, range(groups.start * head, groups.stop * head)
