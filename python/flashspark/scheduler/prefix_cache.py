"""Which pages of K/V may be used again: a radix tree over the tokens that they were computed from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Namespace = tuple[str, ...]  # requests of different ones never share


class CachedPage:
    """A node of the tree: the page of K/V of the tokens `key`, which come after those of its ancestors."""

    __slots__ = ("children", "key", "num_users", "page", "parent")

    def __init__(self, page: int, parent: CachedPage | None, key: tuple[object, ...]) -> None:
        self.page, self.parent, self.key = page, parent, key
        self.children: dict[tuple[object, ...], CachedPage] = {}
        self.num_users = 1  # who makes it holds it


class PrefixCache:
    """Owns the pages that were published to it until they are evicted. Target and draft K/V share page ids.

    A page is held by the requests that hold a path through it, each once, so whoever holds a page holds its ancestors.
    Pages that nobody holds can be evicted, the least recently used first; a path is let go from its end, which is why
    no page goes before its children.
    """

    def __init__(self, page_size: int, enabled: bool = True) -> None:
        self._page_size, self.enabled = page_size, enabled
        self._root = CachedPage(0, None, ())
        self._unused: OrderedDict[CachedPage, None] = OrderedDict()  # least recently used first
        self.num_pages = 0

    @property
    def num_evictable(self) -> int:
        """Pages that nobody holds."""
        return len(self._unused)

    def match(self, namespace: Namespace, tokens: Sequence[int], at_most: int) -> list[CachedPage]:
        """The path of the longest prefix of `tokens` that is there, whole pages of up to `at_most` tokens; not held."""
        path: list[CachedPage] = []
        node = self._root
        for i in range(min(at_most, len(tokens)) // self._page_size):
            child = node.children.get(self._key(namespace, tokens, i))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def hold(self, path: Sequence[CachedPage]) -> None:
        """Nothing of `path` is evicted until it is let go."""
        for node in path:
            if node.num_users == 0:
                del self._unused[node]
            node.num_users += 1

    def let_go(self, path: Sequence[CachedPage]) -> None:
        """The end of one `hold`, or of what `publish` held; these pages are the most recently used now."""
        for node in reversed(path):
            node.num_users -= 1
            if node.num_users == 0:
                self._unused[node] = None

    def publish(
        self,
        path: list[CachedPage],
        namespace: Namespace,
        tokens: Sequence[int],
        num_tokens: int,
        pages: Sequence[int],
        past_twins: bool = False,
    ) -> None:
        """Extends the held `path` over the full pages of the first `num_tokens` of `tokens`, whose K/V `pages` hold.

        Where the cache has the same tokens in another page, it keeps that one, and the caller's own, a twin, stays the
        caller's. The path ends before the first twin, so that it leads `pages`; for a caller that is about to let go
        it goes on `past_twins`.
        """
        if not self.enabled:
            return
        node = path[-1] if path else self._root
        for i in range(len(path), num_tokens // self._page_size):
            key = self._key(namespace, tokens, i)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = CachedPage(pages[i], node, key)
                self.num_pages += 1
            elif past_twins:
                self.hold((child,))
            else:
                return
            path.append(child)
            node = child

    def evict(self, count: int) -> list[int]:
        """Gives up the `count` least recently used pages of those that nobody holds, or all of them."""
        pages = []
        for _ in range(min(count, len(self._unused))):
            node, _ = self._unused.popitem(last=False)
            assert node.parent is not None and not node.children
            del node.parent.children[node.key]
            pages.append(node.page)
        self.num_pages -= len(pages)
        return pages

    def _key(self, namespace: Namespace, tokens: Sequence[int], i: int) -> tuple[object, ...]:
        page = tuple(tokens[i * self._page_size : (i + 1) * self._page_size])
        return page if i else (namespace, *page)
