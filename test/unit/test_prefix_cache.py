"""The radix tree and the allocator under random traffic, against a plain dictionary of prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.scheduler.kv_pages import PageAllocator, num_pages_for
from flashspark.scheduler.prefix_cache import CachedPage, PrefixCache

PAGE = 2
Key = tuple[tuple[str, ...], tuple[int, ...]]  # a namespace and all tokens up to the end of a page


@dataclass(eq=False)
class Holder:
    """What a request does to the cache: it found a path, got pages behind it, and computes its tokens bit by bit."""

    namespace: tuple[str, ...]
    tokens: list[int]
    path: list[CachedPage]
    pages: list[int]
    num_found: int
    num_done: int = 0


@dataclass
class Model:
    """What the tree should hold, and since when nobody has used it."""

    pages: dict[Key, int] = field(default_factory=dict)
    last_used: dict[Key, int] = field(default_factory=dict)
    clock: int = 0

    def key(self, holder: Holder, i: int) -> Key:
        return holder.namespace, tuple(holder.tokens[: (i + 1) * PAGE])

    def match(self, namespace, tokens, at_most: int) -> list[int]:
        found = []
        for end in range(PAGE, min(at_most, len(tokens)) + 1, PAGE):
            page = self.pages.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, holder: Holder, ends: bool) -> None:
        for i in range(holder.num_done // PAGE):
            page = self.pages.setdefault(self.key(holder, i), holder.pages[i])
            if page != holder.pages[i] and not ends:
                return

    def let_go(self, holder: Holder) -> None:
        for i in reversed(range(len(holder.path))):
            self.clock += 1
            self.last_used[self.key(holder, i)] = self.clock

    def evict(self, count: int, holders: list[Holder]) -> list[int]:
        held = {self.key(holder, i) for holder in holders for i in range(len(holder.path))}
        idle = sorted(self.pages.keys() - held, key=self.last_used.__getitem__)[:count]
        return [self.pages.pop(key) for key in idle]


class Traffic:
    """Requests on a small pool, with the model beside it."""

    def __init__(self, num_pages: int) -> None:
        self.cache, self.model = PrefixCache(PAGE), Model()
        self.allocator = PageAllocator(num_pages, self.cache)
        self.holders: list[Holder] = []
        evict = self.cache.evict

        def checked_evict(count: int) -> list[int]:
            pages = evict(count)
            assert pages == self.model.evict(max(count, 0), self.holders)
            return pages

        self.cache.evict = checked_evict

    def arrive(self, namespace: tuple[str, ...], tokens: list[int], room: int) -> None:
        path = self.cache.match(namespace, tokens, len(tokens) - 1)
        assert [node.page for node in path] == self.model.match(namespace, tokens, len(tokens) - 1)
        wanted = num_pages_for(len(tokens), PAGE) - len(path)
        holder = Holder(namespace, tokens, path, [node.page for node in path], len(path), len(path) * PAGE)
        self.holders.append(holder)
        self.cache.hold(path)
        available = self.allocator.num_available
        pages = self.allocator.allocate(wanted, room, path[-1].page if path else 0)
        assert (pages is None) == (wanted > available)
        if pages is None:
            self.holders.remove(holder)
            self.cache.let_go(path)
            self.model.let_go(holder)
        else:
            holder.pages += pages

    def grow(self, holder: Holder, token: int) -> None:
        if len(holder.tokens) == len(holder.pages) * PAGE:
            available = self.allocator.num_available
            pages = self.allocator.extend(holder.pages[holder.num_found :], 1)
            assert (pages is None) == (available == 0)
            if pages is None:
                return
            holder.pages += pages
        holder.tokens.append(token)

    def publish(self, holder: Holder, ends: bool = False) -> None:
        self.model.publish(holder, ends)
        self.cache.publish(
            holder.path, holder.namespace, holder.tokens, holder.num_done, holder.pages, past_twins=ends
        )

    def leave(self, holder: Holder, publishes: bool) -> None:
        if publishes:
            self.publish(holder, ends=True)
        cached = {node.page for node in holder.path}
        self.allocator.free([page for page in holder.pages if page not in cached])
        self.allocator.end_claim(holder.pages[holder.num_found])
        self.cache.let_go(holder.path)
        self.holders.remove(holder)
        self.model.let_go(holder)

    def check(self) -> None:
        own = [page for h in self.holders for page in h.pages[len(h.path) :]]
        cached = list(self.model.pages.values())
        out = own + cached
        assert len(out) == len(set(out)) == self.allocator.num_pages - self.allocator.num_free
        assert len(cached) == self.cache.num_pages
        held = {node.page for holder in self.holders for node in holder.path}
        assert self.cache.num_evictable == len(cached) - len(held)
        for holder in self.holders:  # what is held is there, in the pages that the request reads
            assert [node.page for node in holder.path] == holder.pages[: len(holder.path)]
            keys = [self.model.key(holder, i) for i in range(len(holder.path))]
            assert [self.model.pages[key] for key in keys] == holder.pages[: len(holder.path)]


@settings(deadline=None, max_examples=150)
@given(num_pages=st.integers(4, 24), data=st.data())
def test_against_a_dictionary(num_pages, data):
    """Always the model's pages, evicted in the model's order; none lost, doubled or taken from its holders."""
    traffic = Traffic(num_pages)
    token = st.integers(0, 1)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["arrive", "compute", "grow", "leave", "evict"]))
        holder = data.draw(st.sampled_from(traffic.holders)) if traffic.holders else None
        if action == "arrive":
            namespace = data.draw(st.sampled_from([(), ("a",)]))
            traffic.arrive(
                namespace, data.draw(st.lists(token, min_size=1, max_size=12)), data.draw(st.integers(0, 8))
            )
        elif action == "evict":
            traffic.allocator.free(traffic.cache.evict(data.draw(st.integers(0, 3))))
        elif holder is None:
            continue
        elif action == "compute":
            holder.num_done = data.draw(st.integers(holder.num_done, len(holder.tokens)))
            traffic.publish(holder)
        elif action == "grow":
            traffic.grow(holder, data.draw(token))
        else:
            traffic.leave(holder, data.draw(st.booleans()))
        traffic.check()
    for holder in list(traffic.holders):
        traffic.leave(holder, True)
    traffic.check()
    assert traffic.allocator.num_available == num_pages
    traffic.allocator.free(traffic.cache.evict(num_pages))
    assert (traffic.allocator.num_free, traffic.cache.num_pages) == (num_pages, 0)


def served(cache: PrefixCache, tokens: list[int], pages: list[int], namespace: tuple[str, ...] = ()) -> None:
    """A request with these tokens has come and gone."""
    path: list[CachedPage] = []
    cache.publish(path, namespace, tokens, len(tokens), pages, past_twins=True)
    cache.let_go(path)


def pages_of(cache: PrefixCache, tokens: list[int], namespace: tuple[str, ...] = ()) -> list[int]:
    return [node.page for node in cache.match(namespace, tokens, len(tokens))]


def test_full_pages_of_a_common_prefix():
    cache = PrefixCache(PAGE)
    served(cache, [1, 2, 3, 4, 5], [7, 8, 9])  # the third page is not full
    assert pages_of(cache, [1, 2, 3, 4, 5, 6]) == [7, 8]
    assert pages_of(cache, [1, 2, 3, 9]) == [7]
    assert pages_of(cache, [2, 1, 3, 4]) == []
    assert [node.page for node in cache.match((), [1, 2, 3, 4], 3)] == [7]
    served(cache, [1, 2, 6, 6], [1, 5])  # its first page is a twin
    assert pages_of(cache, [1, 2, 6, 6]) == [7, 5]


def test_namespaces_share_nothing():
    cache = PrefixCache(PAGE)
    served(cache, [1, 2], [7], ("", "a"))
    served(cache, [1, 2], [8], ("a", ""))
    assert pages_of(cache, [1, 2]) == []
    assert pages_of(cache, [1, 2], ("", "a")) == [7]
    assert pages_of(cache, [1, 2], ("a", "")) == [8]


def test_the_least_recently_used_page_goes_first_and_no_page_before_its_children():
    cache = PrefixCache(PAGE)
    served(cache, [1, 1, 2, 2, 3, 3], [1, 2, 3])
    served(cache, [5, 5, 6, 6], [5, 6])
    path = cache.match((), [1, 1, 2, 2], 4)
    cache.hold(path)
    assert cache.evict(9) == [3, 6, 5]
    cache.let_go(path)
    assert cache.evict(1) == [2]
    assert pages_of(cache, [1, 1, 2, 2]) == [1]


def test_a_cache_that_is_off_keeps_nothing():
    cache = PrefixCache(PAGE, enabled=False)
    served(cache, [1, 2], [7])
    assert (cache.num_pages, pages_of(cache, [1, 2])) == (0, [])


def contiguous(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def test_requests_stay_in_runs_while_the_cache_fills_the_pool():
    """Requests of up to ten pages after one another on eighty pages: room is made where the oldest lie."""
    cache = PrefixCache(PAGE)
    allocator = PageAllocator(80, cache)
    for i in range(24):
        pages = allocator.allocate(1, room=10)
        for _ in range(9 if i % 3 else 4):
            pages += allocator.extend(pages, 1)
        assert contiguous(pages)
        path: list[CachedPage] = []
        cache.publish(path, (), [i] * (PAGE * len(pages)), PAGE * len(pages), pages)
        cache.let_go(path)
        allocator.end_claim(pages[0])
    assert cache.num_pages >= 60


def test_a_request_that_may_fill_the_pool_does_not_empty_the_cache():
    cache = PrefixCache(PAGE)
    allocator = PageAllocator(80, cache)
    for i in range(16):
        pages = allocator.allocate(5)
        served(cache, [i] * 5 * PAGE, pages)
        allocator.end_claim(pages[0])
    assert allocator.num_free == 0
    first = allocator.allocate(2, room=80)
    assert cache.num_pages == 70
    second = allocator.allocate(12, room=80)
    assert contiguous(first) and contiguous(second)
    assert cache.num_pages >= 40


def test_the_next_turn_lies_behind_the_last():
    cache = PrefixCache(PAGE)
    allocator = PageAllocator(20, cache)
    first = allocator.allocate(3, room=6)
    other = allocator.allocate(2, room=4)
    served(cache, [1, 1, 2, 2, 3], first)
    allocator.end_claim(first[0])
    allocator.free(first[2:])
    path = cache.match((), [1, 1, 2, 2, 3, 4, 5], 6)
    cache.hold(path)
    assert allocator.allocate(2, room=4, behind=path[-1].page) == [3, 4]
    assert other == [7, 8]
    # Who shares the first page only finds what is behind it taken.
    assert allocator.allocate(1, room=3, behind=path[0].page) == [11]


def test_cached_pages_go_before_what_others_claim():
    cache = PrefixCache(PAGE)
    allocator = PageAllocator(6, cache)
    claimant = allocator.allocate(1, room=3)
    served(cache, [1, 1, 2, 2], allocator.allocate(2, room=2))
    allocator.end_claim(4)
    assert allocator.num_free == 3
    assert allocator.allocate(3, room=1) == [4, 5, 6]
    assert claimant + allocator.extend(claimant, 2) == [1, 2, 3]
