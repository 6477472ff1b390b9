"""The page allocator under random traffic: nothing is handed out twice, lost, or invented; what fits is one run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashspark.scheduler.kv_pages import PageAllocator, num_pages_for


def give_back(allocator: PageAllocator, pages: list[int]) -> None:
    allocator.end_claim(pages[0])
    allocator.free(pages)


@given(num_pages=st.integers(1, 40), data=st.data())
def test_conservation(num_pages, data):
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["allocate", "extend", "free"]))
        owner = data.draw(st.integers(0, len(held) - 1)) if held else 0
        wanted, free = data.draw(st.integers(1, num_pages + 1)), allocator.num_free
        if action == "free" and held:
            give_back(allocator, held.pop(owner))
        else:
            extends = action == "extend" and bool(held)
            pages = (
                allocator.extend(held[owner], wanted)
                if extends
                else allocator.allocate(wanted, data.draw(st.integers(0, 12)))
            )
            assert (pages is None) == (wanted > free)
            if pages is not None:
                assert len(pages) == wanted
                held[owner:owner] = [] if extends else [pages]
                if extends:
                    held[owner] += pages
        out = [page for pages in held for page in pages]
        assert len(out) == len(set(out))
        assert all(1 <= page <= num_pages for page in out)
        assert allocator.num_free == num_pages - len(out)
    for pages in held:
        give_back(allocator, pages)
    assert allocator.allocate(num_pages) == list(range(1, num_pages + 1))


@given(order=st.permutations(range(8)), freed=st.sets(st.integers(0, 7)))
def test_requests_that_fit_stay_in_one_run(order, freed):
    """Eight requests that grow a page at a time in any order, some of them replaced by others: all in runs."""
    allocator = PageAllocator(8 * 5)
    held = [allocator.allocate(1, room=5) for _ in range(8)]
    for growing in (order, *[order] * 3):
        for request in growing:
            held[request] += allocator.extend(held[request], 1)
    for request in freed:
        give_back(allocator, held[request])
    for request in freed:
        held[request] = allocator.allocate(2, room=5)
    for request in freed:
        held[request] += allocator.extend(held[request], 3)
    assert all(pages == list(range(pages[0], pages[0] + 5)) for pages in held)


def test_claims_give_way_when_nothing_else_is_free():
    allocator = PageAllocator(6)
    first = allocator.allocate(1, room=5)
    second = allocator.allocate(1, room=5)
    assert (first, second) == ([1], [6])
    second += allocator.extend(second, 2)
    assert second == [6, 2, 3]
    assert allocator.extend(first, 3) is None
    assert allocator.extend(first, 2) == [4, 5]


def test_a_page_is_freed_once():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="not out"):
        allocator.free(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens, pages):
    assert num_pages_for(tokens, 16) == pages
