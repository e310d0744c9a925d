"""Places of positives equal a search by hand."""

import numpy as np
import pytest

from tokamake.train.objectives.retrieval import scoring
from tokamake.train.objectives.retrieval.scoring import places_of_positives, scores_of_places


def test_places_equal_a_search_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_QUESTIONS", 4)
    generator = np.random.default_rng(0)
    of_passages = generator.normal(size=(12, 6)).astype(np.float32)
    labels = np.zeros((11, 5), np.int64)
    for row in labels:
        row[:3] = generator.choice(np.arange(1, 13), 3, replace=False)
        row[3:] = row[0], generator.integers(1, 13)
    labels[4, 1:3] = 0  # it has no negatives
    queries = generator.normal(size=(11, 1, 6)).astype(np.float32)
    vectors = np.concatenate((queries, of_passages[labels[:, :3] - 1]), axis=1)
    expected = []
    for row, label in enumerate(labels):
        pool = {*labels[:, :3].flatten().tolist()} - {0} - ({*label[3:].tolist()} - {label[0]})
        order = sorted(pool, key=lambda n: -float(queries[row, 0] @ of_passages[n - 1]))
        expected.append(order.index(label[0]) + 1)
    places = places_of_positives(vectors, labels)
    assert places.tolist() == expected
    result = scores_of_places(places)
    assert result["accuracy_at_5"] == np.mean([place <= 5 for place in expected])
    assert result["average_rank"] == pytest.approx(np.mean(expected))
    assert result["mean_reciprocal_rank"] == pytest.approx(np.mean([1 / p for p in expected]))
