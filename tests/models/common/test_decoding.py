"""One token of each sequence in C++: the logits of the layers themselves."""

from pathlib import Path

import pytest
import torch

from tests.support import hf_folder
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.detect import open_any
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.layout import WHOLE_MODEL, Peers
from tokamake.inference.model import InferenceModel
from tokamake.models.common import decoding
from tokamake.runtime.ranks import Ranks

LLAMAS = [name for name in FAMILIES if FAMILIES[name].family == "llama"]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
STEPS = [[20, 21, 22], [23, 24, 25], [26, 27, 28]]


def logits_of(folder: Path, *, even: bool, first: int) -> list[torch.Tensor]:
    """Logits of prompts, and of tokens that follow; then, after a sequence has left."""
    alone = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
    model = DrivenModel(InferenceModel(open_any(folder), WHOLE_MODEL, peers=alone), 1)
    model.new_cache(5, 32)
    if first:
        model.extend([[1, 2], [3, 4]])
    prompts = [[5, 6, 7]] * 3 if even else PROMPTS
    outputs = [model.extend(prompts, first=first)]
    outputs += [model.extend([[token] for token in step], first=first) for step in STEPS]
    model.move(first + 2, first)
    model.clear(first + 2)
    outputs.append(model.extend([[30], [31]], first=first))
    return outputs


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize(("even", "first"), [(True, 0), (False, 0), (False, 2)])
def test_logits_equal_those_of_the_layers(
    name: str, even: bool, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {key: tensor.float() / 5 for key, tensor in weights(FAMILIES[name]).items()}
    hf_folder.write(tmp_path, FAMILIES[name], small)
    calls = []
    decode = decoding.decode
    monkeypatch.setattr(
        decoding, "decode", lambda *a, **options: (calls.append(1), decode(*a, **options))[1]
    )
    decoded = logits_of(tmp_path, even=even, first=first)
    assert len(calls) == len(STEPS) + 1
    monkeypatch.setattr(decoding, "applies", lambda *_, **__: False)
    expected = logits_of(tmp_path, even=even, first=first)
    assert len(calls) == len(STEPS) + 1
    for one, other in zip(decoded, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LLAMAS])
def test_other_families_use_their_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder.write(tmp_path, FAMILIES[name], weights(FAMILIES[name]))
    monkeypatch.setattr(decoding, "decode", lambda *_, **__: pytest.fail("not its layers"))
    assert all(each.isfinite().all() for each in logits_of(tmp_path, even=False, first=0))


def test_infinite_states_stay_infinite_or_become_nan(tmp_path: Path) -> None:
    """Fast arithmetic must not hide broken weights."""
    name = LLAMAS[0]
    broken = {key: tensor.float() for key, tensor in weights(FAMILIES[name]).items()}
    key = next(key for key in broken if key.endswith("down_proj.weight"))
    broken[key].fill_(float("inf"))
    hf_folder.write(tmp_path, FAMILIES[name], broken)
    outputs = logits_of(tmp_path, even=True, first=0)
    assert not any(each.isfinite().all() for each in outputs)
