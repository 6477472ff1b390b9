"""The search for algorithms of matrix products keeps few of them, and none too few."""

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
from matmul_algorithms import fewest, word

from flashspark.kernels.cublaslt import Algorithm, _AlgorithmData
from flashspark.kernels.matmul_seeds import configurations

cells = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1.0, 2.0), min_size=1), min_size=1, max_size=12
)


@given(cells, st.floats(1.0, 2.0), st.floats(0.0, 0.2))
def test_every_cell_worth_it_has_one_within_the_tolerance(times, usual, tolerance):
    chosen = fewest(times, [usual] * len(times), tolerance)
    assert len(set(chosen)) == len(chosen) <= len(times)
    for cell in times:
        limit = min(cell.values()) * (1 + tolerance)
        if limit < usual:
            assert any(cell.get(name, 9.0) <= limit for name in chosen)


def test_one_that_is_good_everywhere_suffices():
    assert fewest([{"a": 1.0, "b": 1.005}, {"b": 1.005, "c": 1.0}], [2.0, 2.0], 0.01) == ["b"]
    assert fewest([{"a": 1.0}], [1.0], 0.01) == []


def test_words_are_those_of_the_seeds():
    found = configurations(to_float32=True)[0]
    tile, splits, custom, cluster = map(int, word(Algorithm(found, _AlgorithmData())).split("."))
    assert (tile, splits, custom, cluster) == (found[1], found[2], found[5], found[8])
