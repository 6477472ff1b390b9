"""The page allocator under random traffic: nothing is handed out twice, lost, or invented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashspark.scheduler.kv_pages import PageAllocator, num_pages_for


@given(num_pages=st.integers(1, 40), data=st.data())
def test_conservation(num_pages, data):
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            wanted = data.draw(st.integers(0, num_pages + 1))
            free = allocator.num_free
            pages = allocator.allocate(wanted)
            assert (pages is None) == (wanted > free)
            if pages is not None:
                assert len(pages) == wanted
                held.append(pages)
        out = [page for pages in held for page in pages]
        assert len(out) == len(set(out))
        assert 0 not in out
        assert all(1 <= page <= num_pages for page in out)
        assert allocator.num_free == num_pages - len(out)


def test_a_page_is_freed_once():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="not out"):
        allocator.free(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens, pages):
    assert num_pages_for(tokens, 16) == pages
