"""How products are made is a matter of speed alone, and chosen by bursts of calls, then under load."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashspark.kernels import cublaslt, matmul_choice
from flashspark.kernels import matmul as module
from flashspark.kernels.matmul import LIBRARIES, chosen, matmul
from flashspark.kernels.matmul_choice import HeavyProduct, burst, choose, in_order, quickest, under_load
from flashspark.kernels.matmul_seeds import configurations
from parity import DEVICE, assert_close, randn

NEVER = float("inf")
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(module, "_chosen", {})


def test_a_cpu_and_float32_have_no_choice():
    weights = [torch.zeros(4, 4, dtype=torch.bfloat16)], [randn(4, 4)]
    assert choose([(group, None) for group in weights], [1, 2]) == 0
    assert chosen() == {}
    assert not cublaslt.is_available() or DEVICE != "cpu"


def test_the_structures_are_as_large_as_the_librarys():
    assert ctypes.sizeof(cublaslt._AlgorithmData) == 64
    assert ctypes.sizeof(cublaslt._Heuristic) == 96


def algorithm(number: int) -> cublaslt.Algorithm:
    return cublaslt.Algorithm((66, number), cublaslt._AlgorithmData())


def test_an_algorithm_is_its_configuration():
    assert algorithm(1) == algorithm(1)
    assert len({algorithm(1), algorithm(1), algorithm(2)}) == 2
    for to_float32 in (False, True):
        found = configurations(to_float32)
        assert len(set(found)) == len(found) > 10
        assert {len(configuration) for configuration in found} == {9}


@given(st.lists(st.floats(0.5, 1.5) | st.just(float("inf")), max_size=20), st.floats(0.5, 1.5))
def test_the_quickest_wins_if_it_is_clearly_better_than_the_usual(times, usual):
    found = dict(zip(map(algorithm, range(len(times))), times, strict=True)) | {"default": usual}
    finals = burst(8, list(found), lambda rows, ways, rounds: [found.get(way, NEVER) for way in ways])
    assert next(iter(finals)) == "default" and len(finals) <= 1 + matmul_choice.FINALISTS
    best = min(found.values())
    assert found[quickest(finals, 0.99)] == (best if best < 0.99 * usual else usual)


def test_the_final_decides():
    """What was quick once, by chance, does not win."""

    def measure(rows, ways, rounds):
        quick = {"default": 1.0, "cublas": 0.5 if rounds == 1 else 1.1, algorithm(3): 0.9}
        return [quick.get(way, NEVER) for way in ways]

    finals = burst(8, ["default", "cublas", algorithm(3)], measure)
    assert finals == {"default": 1.0, "cublas": 1.1, algorithm(3): 0.9}
    assert quickest(finals, 0.99) == algorithm(3)


def test_an_algorithm_runs_without_workspace_where_it_is_as_quick_so():
    """The same algorithm with and without are two ways; not every one can do a product without."""
    times = {"default": 1.0, algorithm(1): 0.5, algorithm(2): 0.6, algorithm(3): 0.7}
    times |= {algorithm(1).lean: 0.505, algorithm(2).lean: 0.61, algorithm(3).lean: NEVER}
    assert algorithm(1).lean == algorithm(1).lean.lean != algorithm(1)
    contestants = [way for way in times if way == "default" or way.has_workspace]
    finals = burst(8, contestants, lambda rows, ways, rounds: [times[way] for way in ways])
    kept = ["default", algorithm(2), algorithm(3), algorithm(1).lean, algorithm(2).lean]
    assert finals == {way: times[way] for way in kept} and list(finals) == kept


def heavy(num_rows=512, flops=1.0, **times) -> HeavyProduct:
    return HeavyProduct(num_rows, flops, {"default": 1.0, **times})


def test_the_largest_batch_is_first_then_round_ones():
    """By their work: a product three times as large counts three times."""
    sizes = [(rows, flops * rows) for flops in (1.0, 3.0) for rows in (512, 576, 640, 768, 1000)]
    found = [(p.num_rows, p.flops / p.num_rows) for p in in_order([heavy(*size) for size in sizes])]
    assert found == [
        *[(1000, 3.0), (1000, 1.0), (512, 3.0), (768, 3.0), (512, 1.0)],
        *[(640, 3.0), (768, 1.0), (576, 3.0), (640, 1.0), (576, 1.0)],
    ]
    assert in_order([]) == []


def test_under_load_another_one_may_win():
    """Who is far behind in the burst, or in the first round, does not run again."""
    product, alone = heavy(a=0.9, b=0.91, c=0.99, far=1.02), heavy(flops=0.5)
    loaded, runs = {"default": 1.0, "a": 1.04, "b": 0.999, "c": 0.98}, []

    def measure(product, ways, heat_ms):
        runs.append((ways, heat_ms))
        return [loaded[way] for way in ways]

    assert list(under_load([alone, product, product], measure)) == [
        *[(product, "c"), (product, "c"), (alone, "default")]
    ]
    first, second = ["default", "a", "b", "c"], ["c", "b", "default"]
    assert runs == [(first, 300.0), (second, 0.0), (first, 50.0), (second, 0.0)]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(*[st.floats(0.5, 2.0)] * 3)),
    st.tuples(*[st.floats(0.5, 2.0)] * 3),
)
def test_both_rounds_under_load_decide(others, usual):
    """Any times of the burst and of two rounds: by their sum, among those that ran in all; PyTorch's always do."""
    found = {"default": usual, **others}
    rounds = iter((1, 2))

    def measure(product, ways, heat_ms):
        index = next(rounds)
        return [found[way][index] for way in ways]

    product = HeavyProduct(512, 1.0, {way: times[0] for way, times in found.items()})
    [(_, winner)] = under_load([product], measure)
    for index, reach in ((0, 1.12), (1, 1.03)):
        limit = reach * min(times[index] for times in found.values())
        found = {w: times for w, times in found.items() if w == "default" or times[index] <= limit}
    sums = {way: times[1] + times[2] for way, times in found.items()}
    best = min(sums.values())
    assert sums[winner] == (best if best < 0.99 * sums["default"] else sums["default"])


def test_load_ends_when_its_time_is_up():
    seconds = 0.0

    def measure(product, ways, heat_ms):
        nonlocal seconds
        seconds += 2.0
        return [1.0 for _ in ways]

    products = [heavy(512 + 512 * i, a=1.0) for i in range(9)]
    done = [product.num_rows for product, _ in under_load(products, measure, lambda: seconds)]
    assert seconds == 16.0 and done == [row.num_rows for row in in_order(products)[:4]]


class Device:
    """Takes the place of `torch.cuda`, and of the product: its time is what the calls take."""

    def __init__(self, monkeypatch, **ms):
        self.now, self.calls, self.ms = 0.0, [], ms
        monkeypatch.setattr(matmul_choice, "multiply", self.multiply)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Border(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def multiply(self, x, weight, out, way):
        self.calls.append(way)
        self.now += self.ms[way]


class Border:
    def __init__(self, device):
        self._device = device

    def record(self):
        self._at = self._device.now

    def elapsed_time(self, later):
        return later._at - self._at


def test_each_round_of_bursts_begins_with_another_way(monkeypatch):
    """After some calls to warm up. What a way's first call of all costs does not count either."""
    device = Device(monkeypatch, default=0.25, a=0.125, b=0.5)
    bench = matmul_choice.Bench([randn(4, 3), randn(4, 3)], None)
    assert bench.measure(2, ["default", "a", "b"], 3) == [0.5, 0.25, 1.0]
    before, warm = ["default", "a", "b", "default", "default"], ["default"] * 3
    rounds = [["default", "a", "b"], ["a", "b", "default"], ["b", "default", "a"]]
    calls = before + [way for ways in rounds for way in [*warm, *ways]]
    assert device.calls == [way for way in calls for _ in range(2)]
    assert bench.measure(2, ["a"], 1) == [0.25]
    assert len(device.calls) == 2 * (len(calls) + 6)


def test_the_second_half_of_a_block_is_timed(monkeypatch):
    device = Device(monkeypatch, default=1.0, a=0.5)
    bench = matmul_choice.Bench([randn(4, 3), randn(4, 3)], None)
    assert bench.measure_loaded(2, ["a", "default"], 2.0, 50.0) == [1.0, 2.0]
    # A call is of both weights: 50 ms of heat, then blocks of 2 × 30 ms.
    assert device.calls == ["default"] * 50 + ["a"] * 60 + ["default"] * 60


def test_what_is_chosen_by_what(monkeypatch):
    """Few rows and small products by the burst; large ones under load, or, out of time, if the burst is very sure."""
    seconds, loaded = iter(range(0, 100, 6)), []

    class FakeBench:
        def __init__(self, weights, scratch):
            self._width = weights[0].shape[1]
            self.remember = lambda rows, way: found.__setitem__((rows, self._width), way)

        def contestants(self, num_rows):
            return ["default", "cublas", "cublaslt"]

        def measure(self, num_rows, ways, num_rounds):
            by_rows = {576: 0.93, 704: 0.91}
            return [{"default": 1.0, "cublas": by_rows.get(num_rows, 0.97)}.get(way, 1.2) for way in ways]

        def measure_loaded(self, num_rows, ways, call_ms, heat_ms):
            loaded.append((num_rows, ways, call_ms))
            return [{"default": 1.0, "cublas": 1.01}[way] for way in ways]

    found: dict = {}
    monkeypatch.setattr(matmul_choice, "Bench", FakeBench)
    monkeypatch.setattr(matmul_choice, "_has_choice", lambda weight: True)
    monkeypatch.setattr(
        matmul_choice, "under_load", lambda *args: under_load(*args, clock=lambda: next(seconds))
    )
    large, small = torch.empty(4096, 4096, device="meta"), torch.empty(64, 64, device="meta")
    rows = [704, 256, 576, 1024, 512]
    assert choose([([large], None), ([small], None)], rows) == 2
    assert loaded == [
        *[(1024, ["default", "cublas"], 1.0), (1024, ["cublas", "default"], 1.0)],
        *[(512, ["default", "cublas"], 1.0), (512, ["cublas", "default"], 1.0)],
    ]
    by_load, out_of_time = {1024: "default", 512: "default"}, {576: "default", 704: "cublas"}
    by_burst = {256: "cublas"}
    assert found == {(n, 4096): way for n, way in (by_load | out_of_time | by_burst).items()} | {
        (n, 64): "cublas" for n in rows
    }


def test_a_weight_with_gaps_is_multiplied_by_pytorch():
    """Though an algorithm was chosen for its shape."""
    x, wide = randn(2, 4), randn(4, 6)
    module.remember((2, 4, 3, torch.float32), algorithm(1))
    assert cublaslt.is_dense(wide) and cublaslt.is_dense(wide.t()) and not cublaslt.is_dense(wide[:, :3])
    assert torch.equal(matmul(x, wide[:, :3]), x @ wide[:, :3])


def test_what_multiplies_wrongly_is_not_remembered(monkeypatch, caplog):
    real = module.multiply
    monkeypatch.setattr(
        matmul_choice,
        "multiply",
        lambda x, weight, out, way: real(x, weight, out, "default") * (way != "bad"),
    )
    bench = matmul_choice.Bench([randn(4, 3)], None)
    bench.remember(2, "bad")
    bench.remember(3, "cublas")
    assert chosen() == {(2, 4, 3, torch.float32): "default", (3, 4, 3, torch.float32): "cublas"}
    assert "comes out wrong" in caplog.text


@GPU
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_way_multiplies(out_dtype):
    weight = randn(512, 256, dtype=torch.bfloat16)
    for held in (weight, weight.t().contiguous().t()):
        for n in (1, 7, 64):
            x = randn(n, 512, dtype=torch.bfloat16, seed=n)
            expected = (x.double() @ held.double()).to(out_dtype)
            out = torch.empty(n, 256, dtype=out_dtype, device=DEVICE)
            with cublaslt.Product(x, held, out) as product:
                listed = product.algorithms()
            assert listed
            refused = []
            for way in [*LIBRARIES, *listed, *(way.lean for way in listed)]:
                module.remember((n, 512, 256, out_dtype), way)
                out.fill_(float("nan"))
                try:
                    matmul(x, held, out)
                except cublaslt.CublasLtError:
                    refused.append(way)
                else:
                    assert_close(out, expected, 1e-3 if out_dtype == torch.float32 else None)
            assert len(refused) < len(listed) and not any(way.has_workspace for way in refused)


@GPU
def test_choosing_covers_every_row_count_and_keeps_the_product():
    weights = [randn(512, 256, dtype=torch.bfloat16, seed=i) for i in range(3)]
    scratch = torch.empty(200, 256, device=DEVICE)
    assert choose([(weights, None)], [1, 7, 64, 200]) == choose([(weights, scratch)], [1, 200]) == 0
    expected = {(n, 512, 256, torch.bfloat16) for n in (1, 7, 64, 200)}
    assert set(chosen()) == expected | {(n, 512, 256, torch.float32) for n in (1, 200)}
    for n in (1, 7, 64, 100, 200):
        x = randn(n, 512, dtype=torch.bfloat16, seed=n)
        assert_close(matmul(x, weights[0]), x @ weights[0])
        wanted = x.float() @ weights[0].float()
        assert_close(matmul(x, weights[0], scratch[:n]), wanted, 1e-3)


@GPU
def test_large_products_are_chosen_under_load():
    weights = [randn(4096, 4096, dtype=torch.bfloat16, seed=i) / 64 for i in range(2)]
    with torch.inference_mode():
        assert choose([(weights, None)], [512, 640]) == 2
    assert set(chosen()) == {(n, 4096, 4096, torch.bfloat16) for n in (512, 640)}
    for n in (512, 640):
        x = randn(n, 4096, dtype=torch.bfloat16, seed=n)
        assert_close(matmul(x, weights[0]), x @ weights[0])


@GPU
def test_algorithms_are_made_from_their_configuration():
    x, weight = randn(64, 512, dtype=torch.bfloat16), randn(512, 256, dtype=torch.bfloat16)
    out = torch.empty(64, 256, dtype=torch.bfloat16, device=DEVICE)
    with cublaslt.Product(x, weight, out) as product:
        for listed in product.algorithms():
            made = cublaslt.Algorithm.configured(listed.configuration, x.dtype, out.dtype)
            assert made == listed
            assert_close(product.multiply(made), product.multiply(listed).clone())
