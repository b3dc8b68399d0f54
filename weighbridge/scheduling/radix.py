"""A radix tree over token runs: which holders hold which prefixes.

A holder is whatever keeps computed tokens: a slot, a saved copy. Edges carry runs of tokens; a node knows the holders
whose tokens reach at least to its end. Trees of different namespaces never meet.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class _Node:
    __slots__ = ("children", "depth", "holders", "parent", "tokens")

    def __init__(self, tokens: Sequence[int], parent: _Node | None, depth: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.depth = depth  # tokens from the root to the end of this node
        self.children: dict[int, _Node] = {}
        self.holders: set[Hashable] = set()


class RadixTree:
    """Holders by the token runs that they hold, one run per holder."""

    __slots__ = ("_ends", "_roots")

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._ends: dict[Hashable, tuple[str, _Node]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._ends

    def insert(self, holder: Hashable, tokens: Sequence[int], namespace: str = "") -> None:
        """Say that the holder holds these tokens, and no longer what it held before."""
        self.remove(holder)
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = _Node((), None, 0)
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                leaf = _Node(tokens[at:], node, len(tokens))
                node.children[tokens[at]] = leaf
                node = leaf
                break
            common = _common(child.tokens, tokens, at)
            if common < len(child.tokens):
                child = _split(child, common)
            node = child
            at += common
        self._ends[holder] = (namespace, node)
        step: _Node | None = node
        while step is not None:
            step.holders.add(holder)
            step = step.parent

    def remove(self, holder: Hashable) -> None:
        """Forget a holder; nothing happens where it is unknown."""
        known = self._ends.pop(holder, None)
        if known is None:
            return
        namespace, node = known
        step: _Node | None = node
        while step is not None:
            step.holders.discard(holder)
            parent = step.parent
            if not step.holders:
                if parent is None:
                    del self._roots[namespace]
                else:
                    del parent.children[step.tokens[0]]
            step = parent

    def match(self, tokens: Sequence[int], namespace: str = "") -> dict[Hashable, int]:
        """For every holder that shares a prefix with the tokens, how many tokens it shares."""
        shared: dict[Hashable, int] = {}
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(child.tokens, tokens, at)
            at += common
            for holder in child.holders:
                shared[holder] = at
            node = child if common == len(child.tokens) else None
        return shared

    def content(self, holder: Hashable) -> tuple[str, list[int]]:
        """Namespace and tokens of a holder, which must be known."""
        namespace, node = self._ends[holder]
        runs = []
        step: _Node | None = node
        while step is not None:
            runs.append(step.tokens)
            step = step.parent
        return namespace, [token for run in reversed(runs) for token in run]

    def length(self, holder: Hashable) -> int:
        """Tokens that a holder holds; 0 where it is unknown."""
        known = self._ends.get(holder)
        return 0 if known is None else known[1].depth


def _common(run: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """How many tokens of `run` equal those of `tokens` from `at` on."""
    size = min(len(run), len(tokens) - at)
    if run[:size] == tokens[at : at + size]:
        return size
    low, high = 0, size  # run[:low] is equal, run[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _split(node: _Node, at: int) -> _Node:
    """Cut a node in two after `at` tokens; returns the upper part."""
    parent = node.parent
    assert parent is not None
    upper = _Node(node.tokens[:at], parent, node.depth - len(node.tokens) + at)
    upper.holders = set(node.holders)
    parent.children[upper.tokens[0]] = upper
    node.tokens = node.tokens[at:]
    node.parent = upper
    upper.children[node.tokens[0]] = node
    return upper
