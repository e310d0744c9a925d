"""Token ids of documents become one array, with BOS and EOD."""

import numpy as np
import pytest

from tokamake import _csrc


def test_pack_adds_bos_and_eod_to_documents() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, 200)
    lengths[rng.random(200) < 0.3] = 0
    ids = rng.integers(0, 65536, lengths.sum(), np.uint32)
    for bos in (-1, 7):
        for eod in (-1, 65535):
            for dtype in (np.uint16, np.dtype("uint16"), np.int32, "int32"):
                expected: list[int] = []
                for part in np.split(ids, np.cumsum(lengths))[:-1]:
                    if len(part):
                        expected += [bos] * (bos >= 0) + part.tolist() + [eod] * (eod >= 0)
                packed = _csrc.pack(ids, lengths, bos=bos, eod=eod, dtype=dtype)
                assert packed.dtype == dtype
                assert packed.tolist() == expected


def test_pack_refuses_wrong_arguments() -> None:
    ids, lengths = np.array([1, 65536, 3], np.uint32), np.array([2, 0, 1])

    def pack(
        ids: np.ndarray, lengths: np.ndarray, bos: int = -1, eod: int = -1, to: str = "u2"
    ) -> None:
        _csrc.pack(ids, lengths, bos=bos, eod=eod, dtype=to)

    with pytest.raises(IndexError, match="token 65536 is beyond 65535"):
        pack(ids, lengths)
    with pytest.raises(IndexError, match="token 65536"):
        pack(ids[:1], lengths[2:], eod=65536)
    with pytest.raises(IndexError, match="token 70000"):
        pack(ids[:1], lengths[2:], bos=70000)
    with pytest.raises(IndexError, match="token 2147483648 is beyond 2147483647"):
        pack(np.array([2**31], np.uint32), lengths[2:], to="i4")
    for wrong in ([2, 2], [2], [-1, 4], [2**62, 2**62], []):
        with pytest.raises(ValueError, match="length"):
            pack(ids, np.array(wrong, np.int64), to="i4")
    with pytest.raises(ValueError, match="uint16 or int32"):
        pack(ids, lengths, to="i8")
    with pytest.raises(TypeError):
        pack(ids.astype(np.int64), lengths)
    with pytest.raises(TypeError):
        pack(ids[::2], lengths[1:])
    assert _csrc.pack(ids, lengths, bos=-1, eod=-1, dtype="i4").tolist() == [1, 65536, 3]
