"""The prefix table against a slow, obvious one; memory under churn."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.routing.prefix_index import PENDING_BLOCKS, PrefixIndex, match_all

PLACES = 3
CAPACITY = 12


def chain(path: list[int]) -> tuple[int, ...]:
    """Hashes of a path of block contents: each names its whole prefix."""
    return tuple(hash(tuple(path[: n + 1])) for n in range(len(path)))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
operations = st.lists(
    st.tuples(st.sampled_from(["insert", "clear", "match"]), st.integers(0, PLACES - 1), paths), max_size=40
)


class Slow:
    """One instance's cache as an ordered list of whole prefixes."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def insert(self, path: list[int]) -> None:
        for end in range(len(path), 0, -1):
            self.blocks.pop(tuple(path[:end]), None)
            self.blocks[tuple(path[:end])] = None
        while len(self.blocks) > CAPACITY:
            self.blocks.popitem(last=False)

    def match(self, path: list[int]) -> int:
        end = 0
        while end < len(path) and tuple(path[: end + 1]) in self.blocks:
            end += 1
        return end


@settings(max_examples=200, deadline=None)
@given(operations)
def test_it_equals_the_slow_one(steps: list[tuple[str, int, list[int]]]) -> None:
    holders: dict[int, int] = {}
    fast = [PrefixIndex(CAPACITY, holders, place) for place in range(PLACES)]
    slow = [Slow() for _ in range(PLACES)]
    for what, place, path in steps:
        if what == "insert":
            fast[place].insert(chain(path))
            slow[place].insert(path)
        elif what == "clear":
            fast[place].clear()
            slow[place].blocks.clear()
        expected = [one.match(path) for one in slow]
        assert [one.match(chain(path)) for one in fast] == expected
        depths = match_all(holders, chain(path), (1 << PLACES) - 1)
        assert [depths.get(n, 0) for n in range(PLACES)] == expected
        assert [len(one) for one in fast] == [len(one.blocks) for one in slow]
        assert len(holders) == len({block for one in slow for block in one.blocks})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["stored", "removed", "insert"]), paths), max_size=30))
def test_a_precise_index_believes_the_engine(steps: list[tuple[str, list[int]]]) -> None:
    holders: dict[int, int] = {}
    index = PrefixIndex(10_000, holders, 1)
    index.insert(chain([9, 9, 9]))
    index.stored(chain([0]))
    assert index.match(chain([9, 9, 9])) == 0, "what was only guessed is forgotten at the first event"
    known, expected = {chain([0])[0]}, set()
    for what, path in steps:
        hashes = chain(path)
        if what == "stored":
            index.stored(hashes)
            known |= set(hashes)
            expected -= set(hashes)
        elif what == "removed":
            index.removed(hashes)
            known -= set(hashes)
            expected -= set(hashes)
        else:
            index.insert(hashes)
            expected |= set(hashes) - known
        assert set(holders) == known | expected
        assert len(index) == len(known | expected)


def test_churn_leaves_memory_flat() -> None:
    holders: dict[int, int] = {}
    indexes = [PrefixIndex(1_000, holders, place) for place in range(4)]
    for n in range(3_000):
        indexes[n % 4].insert(range(n * 100, n * 100 + 100))
    assert sum(map(len, indexes)) == 4_000
    assert len(holders) == 4_000
    precise = PrefixIndex(100, holders, 5)
    precise.stored([1])
    for n in range(200):
        precise.insert(range(-n * 100 - 100, -n * 100))
    assert len(precise) == PENDING_BLOCKS + 1
