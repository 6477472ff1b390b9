"""Paged attention in Triton against the torch_native backend in float32, itself held against a float64 loop."""

from dataclasses import fields, replace

import pytest
import torch

from flashspark.attention import interface, triton_paged
from flashspark.attention.interface import RaggedQueries
from flashspark.attention.registry import make_backend
from flashspark.kernels.qk_norm_rope import HeadTurn, qk_norm_rope_write
from flashspark.speculative.warm_up import PREFILLS
from paged import Pages
from parity import DEVICE, DTYPES, NEEDS_TRITON, TOLERANCE, assert_close, integers, randn

pytestmark = NEEDS_TRITON
NATIVE = make_backend("torch_native")
NAN = float("nan")


def on_device(queries):
    tensors = {
        f.name: v.to(DEVICE) for f in fields(queries) if torch.is_tensor(v := getattr(queries, f.name))
    }
    return replace(queries, plans={}, **tensors)


def caches(pages, num_kv_heads, dim, dtype, written):
    """Random keys and values in the slots `written`, NaN everywhere else."""
    pair = []
    for seed in (1, 2):
        cache = torch.full((pages.num_slots, num_kv_heads, dim), NAN)
        cache[written] = randn(len(written), num_kv_heads, dim, seed=seed).cpu()
        pair.append(cache.to(DEVICE, dtype))
    return pair


def written_slots(pages, lens):
    return torch.cat([pages.slots(r, torch.arange(n)) for r, n in lens])


def triton_ragged(q, k, v, queries, max_rows, splits, num_reqs=None, is_prefill=False, turn=None):
    from flashspark.kernels.triton.paged_attention import ragged_attention

    queries = on_device(queries)
    return ragged_attention(
        q,
        k,
        v,
        queries.qo_indptr,
        queries.kv_lens,
        num_reqs,
        queries.page_table,
        queries.page_size,
        0.2,
        max_rows,
        splits,
        is_prefill,
        turn,
    )


def native(method, *args):
    """The reference, on the CPU in float32 from the same numbers."""
    args = [a.float().cpu() if torch.is_tensor(a) else a for a in args]
    return getattr(NATIVE, method)(*args)


def assert_attention_close(got, expected):
    assert got.isfinite().all()
    limit = 2e-5 if got.dtype == torch.float32 else TOLERANCE[got.dtype]
    assert_close(got.float().cpu(), expected, limit)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 16, torch.float32),
        (8, 2, 64, torch.float32),
        (3, 1, 128, torch.float32),
        (2, 2, 24, torch.float32),
        (8, 2, 64, torch.bfloat16),
        (3, 1, 128, torch.bfloat16),
        (4, 1, 128, torch.float16),
    ],
    ids=str,
)
def test_verify_windows(heads, kv_heads, dim, dtype):
    """Uneven windows over uneven contexts, padding rows, unwritten slots and unread columns full of NaN."""
    spans = [(0, 37, 5), (2, 0, 8), (1, 90, 1)]
    pages = Pages(3, 104, page_size=16)
    k, v = caches(pages, kv_heads, dim, dtype, written_slots(pages, [(r, s + n) for r, s, n in spans]))
    queries = pages.ragged(spans, padding=3)
    q = torch.full((17, heads + kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
    q[:14, :heads] = randn(14, heads, dim, dtype=dtype)
    got = triton_ragged(q[:, :heads], k, v, queries, 8, 1)
    assert not got[14:].any()
    assert_attention_close(
        got[:14], native("ragged", q[:14, :heads], k.nan_to_num(), v.nan_to_num(), pages.ragged(spans), 0.2)
    )


def projected(pages, spans, heads, kv_heads, dim, dtype, padding=0):
    """Rows of a projection, what turns them at their positions, and the caches before: NaN from each window on."""
    num_rows = sum(n for _, _, n in spans) + padding
    rows = torch.full((num_rows, heads + 2 * kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
    rows[: num_rows - padding] = randn(num_rows - padding, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = randn(num_rows, 1, dim, seed=3)
    weight = randn(heads + kv_heads, dim, dtype=dtype, seed=4)
    turn = HeadTurn(weight, 1e-6, angles.cos().to(dtype), angles.sin().to(dtype))
    return (
        rows,
        turn,
        caches(pages, kv_heads, dim, dtype, written_slots(pages, [(r, s) for r, s, _ in spans])),
    )


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "dtype"),
    [
        (4, 2, 16, 16, torch.float32),
        (3, 1, 128, 3, torch.float32),
        (2, 2, 24, 1, torch.float32),
        (8, 2, 64, 16, torch.bfloat16),
        (4, 1, 128, 64, torch.float16),
    ],
    ids=str,
)
def test_projected_windows_are_turned_and_written(heads, kv_heads, dim, page_size, dtype, splits):
    """Against norm, rope and write by the kernel that does nothing else (in torch), and attention after it: windows
    within a share of the keys and across two, rows of nobody, an absent slot full of nonsense."""
    spans = [(0, 37, 5), (2, 0, 8), (1, 250, 7), (3, 63, 1)]
    pages = Pages(4, 264, page_size=page_size)
    rows, turn, (k, v) = projected(pages, spans, heads, kv_heads, dim, dtype, padding=2)
    plain, num_rows = pages.ragged(spans), len(rows) - 2
    expected_caches = [cache.cpu().clone() for cache in (k, v)]
    arguments = (rows[:num_rows], turn.weight, turn.eps, turn.cos[:num_rows], turn.sin[:num_rows])
    q = qk_norm_rope_write(
        *(a.cpu() if torch.is_tensor(a) else a for a in arguments),
        plain.slots,
        *expected_caches,
        implementation="torch",
    )
    queries = replace(
        plain,
        qo_indptr=torch.cat((plain.qo_indptr, torch.tensor([10**9]))),
        kv_lens=torch.cat((plain.kv_lens, torch.tensor([10**9]))),
        page_table=torch.cat((plain.page_table, plain.page_table[:1] + 10**9)),
    )
    out = triton_ragged(rows, k, v, queries, 8, splits, integers(4), turn=turn)
    assert not out[num_rows:].any()
    for cache, expected in zip((k, v), expected_caches, strict=True):
        assert_close(cache.nan_to_num(7.0).cpu(), expected.nan_to_num(7.0), TOLERANCE[dtype])
    k, v = (cache.nan_to_num() for cache in (k, v))
    assert_attention_close(out[:num_rows], native("ragged", q, k, v, plain, 0.2))


@pytest.mark.parametrize(("max_rows", "most_programs"), [(3, 4), (3, 3), (33, 4)])
def test_the_backend_takes_projected_rows_of_any_window(max_rows, most_programs, monkeypatch):
    """One launch where a program holds a window, two where it does not, of many requests and for prompts: the same
    numbers."""
    pages = Pages(2, 96, page_size=16)
    spans = [(0, 20, max_rows), (1, 0, 2)]
    rows, turn, (k, v) = projected(pages, spans, 8, 2, 16, torch.float32)
    expected = [cache.cpu().clone() for cache in (k, v)]
    on_cpu = HeadTurn(*(a.cpu() if torch.is_tensor(a) else a for a in turn))
    queries = pages.ragged(spans)
    reference = NATIVE.ragged_projected(rows.cpu(), on_cpu, *expected, queries, 0.2)
    separate = []
    monkeypatch.setattr(triton_paged, "MAX_TURNING_PROGRAMS", most_programs)
    monkeypatch.setattr(
        interface,
        "qk_norm_rope_write",
        lambda *args: separate.append(1) or qk_norm_rope_write(*args),
    )
    backend = make_backend("triton", DEVICE)
    for host_lens in (None, ([n for _, _, n in spans], [s + n for _, s, n in spans])):
        given = replace(on_device(queries), max_rows=max_rows, host_lens=host_lens)
        own = [cache.clone() for cache in (k, v)]
        got = backend.ragged_projected(rows, turn, *own, given, 0.2)
        assert_attention_close(got, reference)
        for cache, other in zip(own, expected, strict=True):
            assert_close(cache.nan_to_num(7.0).cpu(), other.nan_to_num(7.0), 1e-5)
    assert len(separate) == (1 if (max_rows, most_programs) == (3, 4) else 2)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("splits", [2, 8])
def test_shares_of_the_keys_and_page_sizes(page_size, splits):
    """Requests with one share, with fewer shares than there could be, and with all of them."""
    spans = [(0, 0, 3), (1, 300, 4), (2, 70, 2)]
    pages = Pages(3, 304, page_size=page_size)
    k, v = caches(pages, 1, 16, torch.float32, written_slots(pages, [(r, s + n) for r, s, n in spans]))
    queries = pages.ragged(spans)
    q = randn(9, 2, 16)
    got = triton_ragged(q, k, v, queries, 4, splits)
    assert_attention_close(got, native("ragged", q, k.nan_to_num(), v.nan_to_num(), queries, 0.2))


@pytest.mark.parametrize(
    "spans", [[(0, 0, 70), (1, 40, 33)], [(0, 0, 1), (1, 40, 3)], [(0, 3, 8), (1, 60, 13)]], ids=str
)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_prefill_chunks(spans, is_prefill):
    """More rows than fit in one tile, and fewer than a tile of prefill has; from a prompt's start, and its middle."""
    pages = Pages(2, 80, page_size=16)
    k, v = caches(pages, 1, 16, torch.float32, written_slots(pages, [(r, s + n) for r, s, n in spans]))
    queries, rows = pages.ragged(spans), [n for _, _, n in spans]
    q = randn(sum(rows), 4, 16)
    for splits in (1, 2):
        got = triton_ragged(q, k, v, queries, max(rows), splits, is_prefill=is_prefill)
        assert_attention_close(got, native("ragged", q, k.nan_to_num(), v.nan_to_num(), queries, 0.2))


@pytest.mark.parametrize("splits", [1, 4])
def test_absent_slots_leave_without_a_look(splits):
    """A bucket of four slots of which two are there: the others' entries are nonsense, and change nothing."""
    spans = [(0, 80, 4), (1, 20, 2)]
    pages = Pages(2, 90, page_size=8)
    k, v = caches(pages, 1, 16, torch.float32, written_slots(pages, [(0, 84), (1, 22)]))
    queries = pages.ragged(spans, padding=5)
    bucket = replace(
        queries,
        qo_indptr=torch.cat((queries.qo_indptr, torch.tensor([10**9, -5]))),
        kv_lens=torch.cat((queries.kv_lens, torch.tensor([10**9, -3]))),
        page_table=torch.cat((queries.page_table, torch.full_like(queries.page_table, 10**9))),
        num_reqs=torch.tensor(2),
    )
    q = randn(11, 2, 16)
    got = triton_ragged(q, k, v, bucket, 4, splits, integers(2))
    assert torch.equal(got, triton_ragged(q, k, v, queries, 4, splits))
    assert not got[6:].any()
    reference = native("ragged", q, k.nan_to_num(), v.nan_to_num(), bucket, 0.2)
    assert_attention_close(got, reference)


def test_a_request_does_not_depend_on_its_neighbours():
    """The same bits alone and in a batch: shares follow from the request's own length."""
    pages = Pages(3, 200, page_size=16)
    k, v = caches(pages, 1, 16, torch.float32, written_slots(pages, [(0, 104), (1, 195), (2, 9)]))
    q = randn(13, 2, 16)
    together = triton_ragged(q, k, v, pages.ragged([(0, 100, 4), (1, 190, 5), (2, 5, 4)]), 8, 4)
    alone = triton_ragged(q[4:9], k, v, pages.ragged([(1, 190, 5)]), 8, 4)
    assert torch.equal(together[4:9], alone)


def triton_block(q, k, v, k_cache, v_cache, queries, causal, window, splits=1, num_reqs=None):
    from flashspark.kernels.triton.paged_attention import block_attention

    queries = on_device(queries)
    return block_attention(
        q,
        k,
        v,
        k_cache,
        v_cache,
        queries.context_lens,
        num_reqs,
        queries.page_table,
        queries.page_size,
        0.2,
        causal,
        window,
        splits,
    )


def block_case(lens, width, heads, kv_heads, dim, dtype, page_size=8):
    pages = Pages(len(lens), max(*lens, 1) + width, page_size=page_size)
    caches_ = caches(pages, kv_heads, dim, dtype, written_slots(pages, list(enumerate(lens))))
    qkv = randn(len(lens), width, heads + 2 * kv_heads, dim, dtype=dtype, seed=3)
    qk, v = qkv.split(
        [heads + kv_heads, kv_heads], 2
    )  # as the layers make them: strides of q and k differ from v's
    q, k = qk.contiguous().split([heads, kv_heads], 2)
    return q, k, v, *caches_, pages.block(list(range(len(lens))), lens, width)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("splits", [1, 4])
def test_draft_blocks(causal, window, splits):
    *tensors, queries = block_case([0, 90, 35], 5, 4, 2, 16, torch.float32)
    q, k, v, k_cache, v_cache = tensors
    got = triton_block(*tensors, queries, causal, window, splits)
    expected = native(
        "block", q, k, v, k_cache.nan_to_num(), v_cache.nan_to_num(), queries, 0.2, causal, window
    )
    assert_attention_close(got, expected)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"), [(8, 2, 128, 8), (6, 2, 64, 16), (2, 1, 24, 1)]
)
def test_draft_blocks_of_all_shapes(dtype, heads, kv_heads, dim, width):
    *tensors, queries = block_case([70, 3], width, heads, kv_heads, dim, dtype, page_size=16)
    q, k, v, k_cache, v_cache = tensors
    got = triton_block(*tensors, queries, False, None)
    expected = native("block", q, k, v, k_cache.nan_to_num(), v_cache.nan_to_num(), queries, 0.2, False, None)
    assert_attention_close(got, expected)


def test_absent_blocks_are_zero():
    q, k, v, k_cache, v_cache, queries = block_case([20, 6, 11], 4, 2, 1, 16, torch.float32)
    expected = triton_block(q, k, v, k_cache, v_cache, queries, True, None)
    bucket = replace(
        queries,
        context_lens=torch.tensor([20, 6, 10**9]),
        page_table=torch.cat((queries.page_table[:2], torch.full_like(queries.page_table[2:], 10**9))),
        num_reqs=torch.tensor(2),
    )
    got = triton_block(q, k, v, k_cache, v_cache, bucket, True, None, 2, integers(2))
    assert torch.equal(got[:2], expected[:2])
    assert not got[2].any()
    cpu = [x.nan_to_num().cpu() for x in (q, k, v, k_cache, v_cache)]
    assert_attention_close(got, NATIVE.block(*cpu, bucket, 0.2, True, None))


def test_a_cpu_without_the_interpreter_is_refused_with_the_remedy(monkeypatch):
    import triton

    assert make_backend("triton", DEVICE).capabilities.supports_ragged_verify_graph
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(
        ValueError, match=r"--attention-backend triton needs a GPU: use torch_native on a CPU"
    ):
        make_backend("triton", "cpu")
    assert make_backend("auto", "cpu").name == "torch_native"
    assert make_backend("auto", "cuda").name == "triton"


def test_who_finishes_last_combines_and_leaves_counters_at_zero():
    """Launch after launch on the same counters, the bits are those of one; results do not depend on the split count
    but for rounding."""
    from flashspark.kernels.triton.paged_attention import _counters

    spans = [(0, 500, 2), (1, 3, 1), (2, 130, 8)]
    pages = Pages(3, 504, page_size=16)
    k, v = caches(pages, 2, 16, torch.float32, written_slots(pages, [(0, 502), (1, 4), (2, 138)]))
    queries = pages.ragged(spans)
    q = randn(11, 4, 16)
    whole = triton_ragged(q, k, v, queries, 8, 1)
    first = triton_ragged(q, k, v, queries, 8, 8)
    assert_close(first, whole, 2e-6)
    for _ in range(2):
        assert torch.equal(triton_ragged(q, k, v, queries, 8, 8), first)
        assert not _counters(q.device).any()


def test_shares_of_programs_without_counters_are_refused():
    from flashspark.kernels.triton.paged_attention import PROGRAMS, ragged_attention

    q, cache = randn(PROGRAMS + 1, 1, 16), randn(16, 1, 16)
    index = torch.arange(PROGRAMS + 2, device=DEVICE)
    ones = torch.ones(PROGRAMS + 1, dtype=torch.int64, device=DEVICE)
    table = torch.zeros(PROGRAMS + 1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="so many programs need no shares"):
        ragged_attention(q, cache, cache, index, ones, None, table, 16, 0.2, 1, 2)


@pytest.fixture
def kernels(monkeypatch):
    """What attention kernels are compiled for as on a GPU, by the calls of a test; none is launched."""
    from flashspark.kernels.triton import launch, paged_attention

    found = []

    class Recorder:
        def __getitem__(self, grid):
            assert len(grid) == 3
            return lambda *args, **kind: found.append(kind)

    monkeypatch.setattr(paged_attention, "_attention_kernel", Recorder())
    monkeypatch.setattr(paged_attention, "is_interpreted", lambda: False)
    monkeypatch.setattr(paged_attention, "_shared_bytes", lambda: 227 << 10)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "can_launch_early", lambda: True)
    return found


def call_backend(num_reqs, max_rows, num_rows, host_lens=None, group=4):
    """Attention of Qwen3's 8 key heads over contexts of up to 8,192 keys."""
    cache = torch.zeros(16, 8, 16, dtype=torch.bfloat16)
    lens, table = (
        torch.zeros(num_reqs + 1, dtype=torch.int64),
        torch.zeros(num_reqs, 512, dtype=torch.int64),
    )
    q = torch.zeros(num_rows, 8 * group, 16, dtype=torch.bfloat16)
    queries = RaggedQueries(lens, lens, lens, lens[1:], table, 16, max_rows, host_lens=host_lens)
    make_backend("triton", "cuda").ragged(q, cache, cache, queries, 0.25)


@pytest.mark.parametrize(("group", "count"), [(2, 8), (4, 10), (5, 10), (8, 10)])
def test_prompts_of_all_lengths_are_prefilled_by_few_kernels(kernels, group, count):
    """All of them tried at start-up: a new one in the middle of serving would hold everybody up for a second."""

    def compiled_for(num_reqs, max_rows, num_rows):
        kernels.clear()
        call_backend(num_reqs, max_rows, num_rows, ([max_rows] * num_reqs,) * 2, group)
        return tuple(kernels[0].items())

    tried = {compiled_for(n, rows, n * rows) for n, rows in PREFILLS}
    needed = set()
    for num_reqs in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 32, 48, 49, 200):
        for max_rows in (*range(1, 80), 100, 333, 1000):
            for num_rows in {num_reqs - 1 + max_rows, min(num_reqs * max_rows, 8192)}:
                needed.add(compiled_for(num_reqs, max_rows, num_rows))
    assert needed == tried
    assert len(tried) == count


@pytest.mark.parametrize(
    ("num_reqs", "width", "rows", "splits"), [(1, 1, 16, 32), (4, 8, 32, 8), (16, 8, 32, 2), (16, 16, 64, 2)]
)
def test_verify_windows_get_tiles_of_their_own_width(kernels, num_reqs, width, rows, splits):
    """Captured steps have few widths: none is run in a larger tile, or fewer shares, for prefill's sake."""
    call_backend(num_reqs, width, num_reqs * width)
    assert [(k["TILE"], k["BLOCK_M"], k["MAX_SPLITS"]) for k in kernels] == [(width, rows, splits)]
