"""Who holds which page of the KV cache: page tables, reference counts, known prefixes, batches.

A page holds K and V of PAGE consecutive tokens of one sequence, in all layers. A sequence sees its
pages through one row of the page table, its slot. The storage itself belongs to the backend.
"""
import hashlib
from dataclasses import dataclass
from itertools import chain

import numpy as np

PAGE = 64  # tokens of a page
FEED = -1  # token of a row whose token is still on the device: the last one drawn for its slot
PARTS_LIMIT = 1 << 28  # bytes of scratch for segments of attention that wait to be merged
GRAPH_SIZES = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128  # rows of decode batches that have a graph
ROW_ARRAYS = "tokens", "positions", "slots", "rope_sets", "tiles", "spans", "logit_rows"


@dataclass
class Batch:
    """The rows of one forward pass: tokens of many sequences, each row with its own place.

    Decoding, a chunk of prefill and the check of a draft differ only in how many rows a sequence
    has.
    """
    tokens: np.ndarray  # int32 [rows]; FEED, or another negative: no token (padding)
    positions: np.ndarray  # int32 [rows], place of the token in its sequence
    slots: np.ndarray  # int32 [rows], row of page_table; negative: padding
    rope_sets: np.ndarray  # int32 [rows], which of Config.rope_sets
    page_table: np.ndarray  # int32 [slots, pages]: as many as the longest sequence has, about
    tiles: np.ndarray  # int32 [n, 4]: first row, rows, slot, position of the first row
    spans: np.ndarray  # int32 [n, 6]: the same of a whole sequence, then: pending, entering
    logit_rows: np.ndarray  # int32 [n], the rows whose logits are wanted
    draws: np.ndarray | None = None  # sampling.ROW [n]: how to draw from each of those
    sizes: tuple | None = None  # rows, tiles and spans, if they were padded to share a graph

    @classmethod
    def of(cls, spans, page_table, tile_tokens):
        """Build from spans (slot, position, tokens, rope_set, wanted), one per sequence.

        `wanted` is how many of the span's last rows need logits. Rows of a span are cut into
        tiles of at most `tile_tokens` rows. Two more numbers matter to recurrent state, which
        cannot be cut back: how many tokens before the span are pending, that is not yet in the
        state in memory (default 0), and how many of these and the span's own enter it now: none,
        those that are pending, or all (default). The others stay pending until a later step says
        which of them count.

        The page table is cut after a power of two of pages that holds all spans, since backends
        split the work on what it could hold: by its whole width a short sequence would get none.
        """
        whole = np.array([(0, len(ids), slot, position, *(state or (0, len(ids))), rope_set, wanted)
                          for slot, position, ids, rope_set, wanted, *state in spans], np.int32)
        counts = whole[:, 1]
        whole[:, 0] = counts.cumsum() - counts
        first, count, slot, start, _, _, rope_set, wanted = whole.repeat(counts, axis=0).T
        row = np.arange(len(first), dtype=np.int32)
        left, position = first + count - row, start + row - first
        tiles = np.array([row, np.minimum(left, tile_tokens), slot, position]).T
        last = int(position[slot >= 0].max(initial=0))
        page_table = page_table[:, :max(4, 1 << (last // PAGE).bit_length())].copy()
        tokens = np.fromiter(chain.from_iterable(ids for _, _, ids, *_ in spans), np.int32)
        return cls(tokens, position, slot, rope_set, page_table,
                   tiles[(row - first) % tile_tokens == 0], whole[:, :6], row[left <= wanted])

    def advance(self, rows):
        """Go on, in place, with the next token of each of the `rows` sequences that have one row
        each: FEED. What enters a state is the caller's. False if the page table is too narrow."""
        if self.positions.max() + 1 == PAGE * self.page_table.shape[1]:
            return False
        self.tokens[:rows] = FEED
        self.positions[:rows] += 1
        self.tiles[:rows, 3] += 1
        self.spans[:rows, 3] += 1
        self.draws["position"][:rows] += 1
        return True

    def padded_to(self, rows, tiles=None, spans=None):
        """The same batch with padding up to so many rows, tiles and spans (default: as many as
        rows). Rows of padding want logits that nobody reads; tiles and spans have one each while
        there are any, then none. Only for decode batches, in which every row wants logits.
        """
        n = len(self.tokens)
        if (n, len(self.tiles), len(self.spans)) == (rows, tiles, spans):
            self.sizes = rows, tiles, spans
            return self
        arrays = self.tokens, self.positions, self.slots, self.rope_sets
        padding = np.array([[-2], [0], [-1], [0]], np.int32).repeat(rows - n, axis=1)

        def cover(array, count):
            more = [(min(row, rows - 1), int(row < rows), -1, 0, 0, 0)[:array.shape[1]]
                    for row in range(n, n + (count or rows) - len(array))]
            return np.concatenate([array, np.array(more, np.int32).reshape(-1, array.shape[1])])
        return Batch(*np.concatenate([arrays, padding], axis=1), self.page_table,
                     cover(self.tiles, tiles), cover(self.spans, spans),
                     np.arange(rows, dtype=np.int32), sizes=(rows, tiles, spans))

    def graph_sizes(self):
        """(rows, tiles, spans) to pad a decode batch to, so that few graphs serve all; or None for
        other batches and larger ones. Tiles stay fewer than rows where they were: see
        device.attention.
        """
        bucket = lambda count: next((size for size in GRAPH_SIZES if size >= count), 0)
        n, tiles, spans = len(self.tokens), bucket(len(self.tiles)), bucket(len(self.spans))
        rows = bucket(max(n, tiles + (n > len(self.tiles))))
        return (rows, tiles, spans) if n == len(self.logit_rows) and rows and tiles else None


def state_layout(cfg, pending):
    """Recurrent state of a sequence in one layer: values of its matrices, then places in the ring
    of recent tokens and values of each, see States in reference.py. A step leaves at most `pending`
    tokens pending: the ring holds those and those that become so, or those and what the
    convolution looks back at."""
    matrix = cfg.delta_v_heads * cfg.delta_dim ** 2
    ring = max(2 * pending, pending + cfg.conv_width - 1)
    no_q = cfg.delta_channels - cfg.delta_k_heads * cfg.delta_dim
    return matrix, ring, cfg.delta_channels + no_q + 2 * cfg.delta_v_heads


class PagePool:
    """Reference-counted pages. A page with no holder is free."""

    def __init__(self, n_pages):
        self.n_pages = n_pages
        self.holders = np.zeros(n_pages, np.int32)
        self.free = list(range(n_pages - 1, -1, -1))

    @property
    def free_count(self):
        return len(self.free)

    def take(self, count):
        """`count` free pages, one holder each. The caller has checked free_count."""
        assert count <= len(self.free), "admission must check free_count"
        pages = [self.free.pop() for _ in range(count)]
        self.holders[pages] = 1
        return pages

    def share(self, pages):
        """One more holder for each of `pages`."""
        self.holders[pages] += 1

    def give(self, pages):
        """One holder less for each of `pages`."""
        self.holders[pages] -= 1
        self.free += [page for page in pages if self.holders[page] == 0]


class PrefixCache:
    """What is known of sequences that were computed before, found again by the tokens up to there.

    An entry holds one full page. Its key is the SHA-256 of what else decides its bits (`root`: the
    RoPE set, and a salt that keeps callers apart) and of all tokens up to its end. The cache is one
    holder of the pages of each entry and lets the least recently used entries go when pages are
    short.
    """

    def __init__(self, pool):
        self.pool = pool
        self.entries = {}  # key -> (its tokens, pages, state), least recently used first
        self.held = np.zeros(pool.n_pages, np.int32)  # how many entries hold each page

    @property
    def unused(self):
        """How many pages nobody else holds."""
        return int(np.count_nonzero((self.held > 0) & (self.held == self.pool.holders)))

    def find(self, ids, root):
        """(pages, tokens in them, None) of the longest known prefix, the pages held once more."""
        found = []
        for key, end in keyed_prefixes(ids, root, range(PAGE, len(ids) + 1, PAGE)):
            known, pages, _ = self.entries.get(key, (None, None, None))
            if known != ids[end - PAGE:end]:
                break
            found.append((key, *pages))
        self.touch([key for key, _ in found])
        pages = [page for _, page in found]
        self.pool.share(pages)
        return pages, PAGE * len(pages), None

    def add(self, ids, pages, root, state=None):
        """Remember those of `pages` that `ids` fill."""
        keys = []
        for key, end in keyed_prefixes(ids, root, range(PAGE, len(ids) + 1, PAGE)):
            keys.append(key)
            self.hold(key, ids[end - PAGE:end], [pages[end // PAGE - 1]])
        self.touch(keys)

    def hold(self, key, tokens, pages, state=None):
        if key not in self.entries:
            self.entries[key] = tokens, pages, state
            self.held[pages] += 1
            self.pool.share(pages)

    def drop(self, key):
        _, pages, _ = self.entries.pop(key)
        self.held[pages] -= 1
        self.pool.give(pages)

    def touch(self, keys):
        for key in reversed(keys):  # the end of a prefix goes before its beginning
            self.entries[key] = self.entries.pop(key)

    def make_room(self, count):
        """Let entries go until `count` pages are free. False, and nothing done, if too few are."""
        if self.pool.free_count + self.unused < count:
            return False
        for key, (_, pages, _) in list(self.entries.items()):
            if self.pool.free_count >= count:
                break
            if (self.pool.holders[pages] == self.held[pages]).any():
                self.drop(key)
        return True


@dataclass(frozen=True)
class Snapshot:
    """A recurrent state as the backend saved it: what save_state gave and load_state takes."""
    committed: int  # tokens that are in it; those behind them are pending, and kept beside it
    data: object


class SnapshotCache(PrefixCache):
    """The same for models with recurrent state, which cannot be cut back to an earlier token.

    An entry is a prefix of any length with all of its pages, the last one partly filled, and the
    state behind it. States have a budget of bytes; past it the least recently used entries go.
    """

    def __init__(self, pool, limit):
        super().__init__(pool)
        self.limit = limit  # bytes of states

    def find(self, ids, root):
        """(pages, tokens, state) of the longest known prefix, the pages held once more."""
        pages, length, state = [], 0, None
        lengths = sorted({len(tokens) for tokens, _, _ in self.entries.values()})
        for key, end in keyed_prefixes(ids, root, lengths):
            if key in self.entries and self.entries[key][0] == ids[:end]:
                _, pages, state = self.entries[key]
                length = end
                self.touch([key])
        self.pool.share(pages)
        return list(pages), length, state

    def add(self, ids, pages, root, state=None):
        """Remember the whole prefix, whose pages these are, with the state behind it."""
        for key, _ in keyed_prefixes(ids, root, [len(ids)]):
            self.hold(key, list(ids), list(pages), state)
            self.touch([key])
        held = sum(state.data.nbytes for _, _, state in self.entries.values())
        for key, (_, _, state) in list(self.entries.items()):
            if held > self.limit:
                self.drop(key)
                held -= state.data.nbytes


def keyed_prefixes(ids, root, lengths):
    """(key, length) of the prefixes of `ids` that have these lengths, which rise."""
    data, at = np.asarray(ids, "<i4"), 0
    digest = hashlib.sha256(hashlib.sha256(root.encode()).digest())  # no root looks like tokens
    for length in lengths:
        if 0 < length <= len(ids):
            digest.update(data[at:length])
            at = length
            yield digest.digest(), length


def common_prefix(a, b):
    """How many tokens the lists `a` and `b` begin with in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differs[0]) if len(differs) else n
