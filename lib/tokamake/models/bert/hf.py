"""How a `bert` is stored: its tensors, and transformers' model type megatron-bert."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.models.common import tensor_shapes
from tokamake.models.common.encoder_format import MEGATRON_BERT, encoder_shapes
from tokamake.models.common.hf_format import label_keys


def _heads(architecture: Architecture) -> tensor_shapes.Shapes:
    """Heads of masked tokens and of the order of sentences, or the head of a task."""
    if architecture.setting("task_head") != "none":
        return _task_head(architecture)
    hidden, vocab_size, head = (
        architecture.hidden_size,
        architecture.vocab_size,
        "masked_token_head",
    )
    assert vocab_size is not None
    tensors: tensor_shapes.Shapes = {f"model.{head}.bias": (vocab_size,)}
    modules = {f"{head}.dense": (hidden, hidden), f"{head}.layernorm": (hidden,)}
    if architecture.setting("sentence_order_head"):
        modules |= {"pooler": (hidden, hidden), "sentence_order_head": (2, hidden)}
    for module, shape in modules.items():
        tensors |= tensor_shapes.with_bias(f"model.{module}", shape, has_bias=True)
    return tensors


def _task_head(architecture: Architecture) -> tensor_shapes.Shapes:
    hidden, tensors = architecture.hidden_size, tensor_shapes.Shapes()
    modules = {"pooler": hidden, "task_head": architecture.setting("num_classes")}
    for module, size in modules.items():
        tensors |= tensor_shapes.with_bias(f"model.{module}", (size, hidden), has_bias=True)
    return tensors


shapes = partial(encoder_shapes, of_heads=_heads)

_WITHOUT_ORDER = "MegatronBertForMaskedLM"
"""transformers' class of models without pooler and head of the order of sentences."""


_OF_TASKS = {
    "classes": "MegatronBertForSequenceClassification",
    "choice": "MegatronBertForMultipleChoice",
}
"""transformers' class of models with each head of a task."""


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    classes = config.get("architectures") or [""]
    of_tasks = [head for head, name in _OF_TASKS.items() if name == classes[0]]
    # transformers writes names of classes, and has two by default.
    num_classes = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    return {
        # transformers looks up type 0 in any case.
        "type_vocab_size": config["type_vocab_size"] or 2,
        "sentence_order_head": not of_tasks and classes != [_WITHOUT_ORDER],
        "task_head": of_tasks[0] if of_tasks else "none",
        "num_classes": {"classes": num_classes, "choice": 1}[of_tasks[0]] if of_tasks else 0,
    }


def _keys(architecture: Architecture) -> dict[str, Any]:
    task_head = architecture.setting("task_head")
    if task_head != "none":
        names = [f"LABEL_{number}" for number in range(architecture.setting("num_classes"))]
        return {"architectures": [_OF_TASKS[task_head]], **label_keys(names)}
    has_order = architecture.setting("sentence_order_head")
    return {} if has_order else {"architectures": [_WITHOUT_ORDER]}


HUGGING_FACE = (
    replace(
        MEGATRON_BERT,
        class_name="MegatronBertForPreTraining",
        keys={**MEGATRON_BERT.keys, "head_act": ("hidden_act",)},
        defaults={**MEGATRON_BERT.defaults, "head_act": "gelu"},
        extra_fields=_fields,
        extra_keys=_keys,
        prefix="bert.",
        names={**MEGATRON_BERT.names, "pooler": "pooler.dense"},
        heads={
            "masked_token_head": "cls.predictions",
            "masked_token_head.dense": "cls.predictions.transform.dense",
            "masked_token_head.layernorm": "cls.predictions.transform.LayerNorm",
            "sentence_order_head": "cls.seq_relationship",
            "task_head": "classifier",
        },
        copies={
            "cls.predictions.decoder.weight": "model.embed_tokens.weight",
            "cls.predictions.decoder.bias": "model.masked_token_head.bias",
        },
    ),
)

REFUSED = dict.fromkeys(
    ("bert", "roberta"),
    "it norms after attention and MLP, and the family bert, as Megatron, before them",
)
