"""Who holds which page of the KV cache: page tables, reference counts, known prefixes, batches.

A page holds K and V of PAGE consecutive tokens of one sequence, in all layers. A sequence sees its
pages through one row of the page table, its slot. The storage itself belongs to the backend.
"""
import hashlib
from dataclasses import dataclass

import numpy as np

PAGE = 64  # tokens of a page


@dataclass
class Batch:
    """The rows of one forward pass: tokens of many sequences, each row with its own place.

    Decoding, a chunk of prefill and the check of a draft differ only in how many rows a sequence
    has.
    """
    tokens: np.ndarray  # int32 [rows]; negative: no token (padding), or see device.embed
    positions: np.ndarray  # int32 [rows], place of the token in its sequence
    slots: np.ndarray  # int32 [rows], row of page_table; negative: padding
    rope_sets: np.ndarray  # int32 [rows], which of Config.rope_sets
    page_table: np.ndarray  # int32 [slots, pages of the longest sequence]
    tiles: np.ndarray  # int32 [n, 4]: first row, rows, slot, position of the first row
    spans: np.ndarray  # int32 [n, 6]: the same of a whole sequence, then: pending, commits
    logit_rows: np.ndarray  # int32 [n], the rows whose logits are wanted

    @classmethod
    def of(cls, spans, page_table, tile_tokens):
        """Build from spans (slot, position, tokens, rope_set, wanted), one per sequence.

        `wanted` is how many of the span's last rows need logits. Rows of a span are cut into
        tiles of at most `tile_tokens` rows. Two more numbers matter to recurrent state, which
        cannot be cut back: how many tokens before the span are pending, that is not yet in the
        state (default 0), and whether this span's own tokens enter it now (default 1) or stay
        pending until a later step says which of them count.
        """
        tokens, positions, slots, sets, tiles, logit_rows, whole = [], [], [], [], [], [], []
        for slot, position, ids, rope_set, wanted, *state in spans:
            row, n = len(tokens), len(ids)
            whole.append((row, n, slot, position, *(state or (0, 1))))
            tiles += [(row + i, min(tile_tokens, n - i), slot, position + i)
                      for i in range(0, n, tile_tokens)]
            tokens += list(ids)
            positions += range(position, position + n)
            slots += [slot] * n
            sets += [rope_set] * n
            logit_rows += range(row + n - wanted, row + n)
        arrays = [np.array(x, np.int32) for x in (tokens, positions, slots, sets)]
        return cls(*arrays, page_table, np.array(tiles, np.int32).reshape(-1, 4),
                   np.array(whole, np.int32).reshape(-1, 6), np.array(logit_rows, np.int32))

    def padded_to(self, rows):
        """The same batch with padding rows up to `rows`, each wanting logits that nobody reads.

        Only for decode batches, in which every row is a tile of its own and wants logits.
        """
        more = rows - len(self.tokens)
        extend = lambda array, value: np.concatenate([array, np.full(more, value, np.int32)])
        spans = np.array([(row, 1, -1, 0, 0, 0) for row in range(len(self.tokens), rows)],
                         np.int32).reshape(-1, 6)
        return Batch(extend(self.tokens, -2), extend(self.positions, 0), extend(self.slots, -1),
                     extend(self.rope_sets, 0), self.page_table,
                     np.concatenate([self.tiles, spans[:, :4]]),
                     np.concatenate([self.spans, spans]), np.arange(rows, dtype=np.int32))


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
    """Full pages of sequences that were computed before, found again by the tokens up to them.

    The key of a page is a SHA-256 chained over the pages before it, starting from what else decides
    its bits (`root`: the RoPE set, and a salt that keeps callers apart). The cache is one holder of
    each of its pages and lets the least recently used go when pages are short.
    """

    def __init__(self, pool):
        self.pool = pool
        self.entries = {}  # key -> (page, its tokens as bytes), least recently used first
        self.cached = np.zeros(pool.n_pages, bool)

    @property
    def unused(self):
        """How many pages nobody else holds."""
        return int(np.count_nonzero(self.cached & (self.pool.holders == 1)))

    def find(self, ids, root):
        """Pages of the longest known prefix of `ids`, with one more holder each."""
        found = []
        for key, tokens in keyed_pages(ids, root):
            page, known = self.entries.get(key, (None, None))
            if known != tokens:
                break
            found.append((key, page))
        self.touch([key for key, _ in found])
        pages = [page for _, page in found]
        self.pool.share(pages)
        return pages

    def add(self, ids, pages, root):
        """Remember those of `pages` that `ids` fill."""
        keys = []
        for (key, tokens), page in zip(keyed_pages(ids, root), pages):
            keys.append(key)
            if key not in self.entries:
                self.entries[key] = page, tokens
                self.cached[page] = True
                self.pool.share([page])
        self.touch(keys)

    def touch(self, keys):
        for key in reversed(keys):  # the end of a prefix goes before its beginning
            self.entries[key] = self.entries.pop(key)

    def make_room(self, count):
        """Let pages go until `count` are free. False, and nothing done, if there are too few."""
        if self.pool.free_count + self.unused < count:
            return False
        for key in list(self.entries) if self.pool.free_count < count else ():
            page, _ = self.entries[key]
            if self.pool.holders[page] == 1:
                del self.entries[key]
                self.cached[page] = False
                self.pool.give([page])
                if self.pool.free_count >= count:
                    break
        return True


def keyed_pages(ids, root):
    """(key, tokens) of each page that `ids` fill."""
    key, data = root.encode(), np.asarray(ids, "<i4").tobytes()
    for at in range(0, len(data) - 4 * PAGE + 1, 4 * PAGE):
        tokens = data[at:at + 4 * PAGE]
        key = hashlib.sha256(key + tokens).digest()
        yield key, tokens


def common_prefix(a, b):
    """How many tokens the lists `a` and `b` begin with in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differs[0]) if len(differs) else n
