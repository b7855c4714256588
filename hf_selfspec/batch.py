"""What drafting, verification and the decode loop pass to each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from .errors import SettingError
from .model.layout import TreeLayout, depths_of
from .model.transfer import RowNumbers, upload


@dataclass
class Text:
    """The token ids of a batch while it grows; rows may be at different lengths.

    Attributes:
        lengths: for each row the number of columns that count.
        base: for each row the cache slot that belongs to column 0 (negative for a padded row).
        prompt_width: number of columns of the prompts.
    """

    _ids: torch.Tensor
    lengths: list[int]
    base: list[int]
    prompt_width: int

    def __post_init__(self) -> None:
        self.new: list[list[int]] = [[] for _ in self.lengths]  # the tokens of each row that were chosen here
        # The last token's column is one less than the length.
        self._slots_before = RowNumbers([base - 1 for base in self.base])
        self._written = RowNumbers(self.lengths)  # as far as ids are on the device
        self._move_to(self._written)
        self.device = self._ids.device
        self.no_draft: Draft | None = None  # see :meth:`Draft.none`

    @classmethod
    def of(cls, input_ids: torch.Tensor, base: list[int], max_new: int) -> Text:
        """The text that starts with ``input_ids`` ``[b, s]``, with ``max_new`` more columns for what follows."""
        b, width = input_ids.shape
        ids = input_ids.new_zeros(b, width + max_new, dtype=torch.long)  # as those of plain generate
        ids[:, :width] = input_ids
        return cls(ids, [width] * b, list(base), width)

    @property
    def ids(self) -> torch.Tensor:
        """``[b, columns]`` the prompts as ``generate`` got them (left-padded) and what follows, which goes to the
        device when somebody asks. Columns beyond a row's length are scratch space."""
        starts, ends = self._written, self._ends
        if starts is not ends:
            new = [row[start - self.prompt_width :] for row, start in zip(self.new, starts, strict=True)]
            most = max(map(len, new))
            # What short rows get beyond their end is scratch space.
            rows = [[end, *row, *[0] * (most - len(row))] for row, end in zip(new, ends, strict=True)]
            packed = upload(rows, self.device)
            ends.keep(packed[:, :1])
            self._written = ends
            self._write(packed[:, 1:], starts)
        return self._ids

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def last_slots(self) -> RowNumbers:
        """Cache slot of each row's last token, the one that has not been through the whole model yet."""
        return self._last_slots

    def _move_to(self, ends: RowNumbers) -> None:
        self.lengths, self._ends = list(ends), ends
        self._last_slots = ends.plus(self._slots_before)

    def last_tokens(self) -> torch.Tensor:
        """The last token of each row, ``[b, 1]``."""
        if min(self.lengths) == max(self.lengths):
            return self.ids[:, self.lengths[0] - 1 : self.lengths[0]]
        return self.ids.gather(1, self._columns(-1, 1))

    def _columns(self, first: int, count: int) -> torch.Tensor:
        """The indices ``[b, count]`` of the columns that start ``first`` columns after each row's end."""
        return self._ends.ahead(first).onwards(count, self.device).expand(self.batch_size, count)

    def prefix(self, row: int, ahead: int = 0) -> torch.Tensor:
        """One row's tokens and ``ahead`` scratch columns, ``[1, s]``."""
        return self.ids[row : row + 1, : self.lengths[row] + ahead]

    def write_draft(self, tokens: torch.Tensor, ahead: int) -> None:
        """Writes ``tokens``, ``[b]`` or ``[b, n]``, to the columns from ``ahead`` after each row's end on."""
        self._write(tokens.reshape(len(tokens), -1), self._ends.ahead(ahead))

    def _write(self, tokens: torch.Tensor, starts: RowNumbers) -> None:
        count = tokens.shape[1]
        self.ensure(max(starts) + count)
        if starts.are_equal:
            self.ids[:, starts[0] : starts[0] + count] = tokens
        else:
            self.ids.scatter_(1, starts.onwards(count, self.device), tokens)

    def put_one(self, row: int, ahead: int, token: int) -> None:
        """Writes one token to a scratch column, ``ahead`` columns after the end of ``row``."""
        column = self.lengths[row] + ahead
        self.ensure(column + 1)
        self.ids[row, column] = token

    def with_draft(self, length: int) -> torch.Tensor:
        """The rows with ``length`` scratch columns ``[b, s]``, aligned right (short rows repeat older columns)."""
        width = max(self.lengths) + length
        if min(self.lengths) == max(self.lengths):
            return self.ids[:, :width]
        return self.ids.gather(1, self._columns(length - width, width).clamp(min=0))

    def around_ends(self, before: int, ahead: int, missing: int) -> torch.Tensor:
        """Each row's last ``before`` columns and ``ahead`` scratch ones, ``[b, before + ahead]``; ``missing`` for those
        that a short row does not have."""
        columns = self._columns(-before, before + ahead)
        return self.ids.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, missing)

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Appends these tokens to each row."""
        if any(tokens):
            for new, chosen in zip(self.new, tokens, strict=True):
                new += chosen
            self._move_to(RowNumbers(self.prompt_width + len(new) for new in self.new))

    def ensure(self, columns: int) -> None:
        if columns > self.ids.shape[1]:
            grown = self.ids.new_zeros(self.ids.shape[0], columns + columns // 4)
            grown[:, : self.ids.shape[1]] = self.ids
            self._ids = grown


@dataclass
class Draft:
    """Tokens proposed after each row's last token: a line, or a tree of any shape for each row.

    Node 0 is the row's last committed token, nodes ``1 .. t`` are the drafted ones; parents come before children.

    Attributes:
        tokens: ``[b, t]`` nodes 1 and up; nodes that a row does not use are junk.
        lengths: for each row the number of tokens on its longest path; for a line, of the tokens that count.
        parents: for each row the parent of nodes ``1 .. t``, -1 for a node that does not count; ``None`` for lines.
        q: ``[b, T, v]`` the distributions at nodes ``0 .. T-1`` from which their sampled children were drawn without
            replacement, in the order of their numbers; ``None`` where none was sampled (greedy, retrieved tokens).
        states: ``[b, T, d]`` hidden states of nodes ``0 .. T-1`` that enter layer ``prefix``, or ``None``; if node
            ``T`` has one, too, ``[b, T + 1, d]``.
        prefix: the first layer that verification has to run for nodes that have a state.
        listed: ``tokens`` as lists, where they are known without reading them from a device; they replace ``tokens``.

    Raises:
        SettingError: the numbers of rows or nodes do not fit together.
    """

    tokens: torch.Tensor
    lengths: list[int]
    parents: list[list[int]] | None = None
    q: torch.Tensor | None = None
    states: torch.Tensor | None = None
    prefix: int = 0
    listed: list[list[int]] | None = None
    _children: dict[int, list[list[int]]] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        b, t = self.tokens.shape
        lists = [values for values in (self.parents, self.listed) if values is not None]
        are_rows = {len(self.lengths), *map(len, lists)} == {b}
        if not (are_rows and all(0 <= length <= t for length in self.lengths) and {*map(len, chain(*lists))} <= {t}):
            raise SettingError(
                f"Draft(tokens [{b}, {t}]) needs {b} lengths of 0 to {t}, and {b} lists of {t} numbers as parents and "
                f"listed where these are given, got lengths {self.lengths}, parents {self.parents}, listed "
                f"{self.listed}."
            )

    @classmethod
    def none(cls, text: Text) -> Draft:
        """A draft without tokens in any row."""
        if text.no_draft is None:
            text.no_draft = cls(text.ids[:, :0], [0] * text.batch_size, listed=[[] for _ in text.lengths])
        return text.no_draft

    @property
    def size(self) -> int:
        """``t``, the number of drafted nodes of a row."""
        return self.tokens.shape[1]

    def on(self, device: torch.device, nodes: TreeLayout | None) -> torch.Tensor:
        """The tokens ``[b, t]``; those that the host knows are uploaded together with their layout."""
        if self.listed is None or not self.size:
            return self.tokens.to(device)
        return upload(self.listed, device) if nodes is None else nodes.tokens(device)[:, 1:]

    def tree(self, roots: Sequence[int] = ()) -> TreeLayout | None:
        """The layout of a tree with these last tokens of all rows, if the host knows them; ``None`` for a line."""
        if self.parents is None:
            return None
        roots = roots or [0] * len(self.parents)
        ids = None if self.listed is None else [[root, *row] for root, row in zip(roots, self.listed, strict=True)]
        return TreeLayout.of_tree(self.parents, ids)

    def children(self, row: int, node: int) -> list[int]:
        """Nodes that continue ``node`` in ``row``, in the order in which they are to be tried."""
        if self.parents is None:
            return [node + 1] if node < self.lengths[row] else []
        if row not in self._children:
            children: list[list[int]] = [[] for _ in range(self.size + 1)]
            for index, parent in enumerate(self.parents[row], start=1):
                if parent >= 0:
                    children[parent].append(index)
            self._children[row] = children
        return self._children[row][node]

    def line(self, row: int) -> Collection[int]:
        """The nodes of a row's longest path, of several the one that ends at the first node; others are siblings."""
        if self.parents is None:
            return range(1, self.lengths[row] + 1)
        parents = self.parents[row]
        depths = depths_of(parents)
        node, nodes = depths.index(max(depths)), set[int]()
        while node:
            nodes.add(node)
            node = parents[node - 1]
        return nodes

    def accepted(self, verdicts: Sequence[Verdict]) -> list[int]:
        """For each row how many tokens of its line were accepted, from which α is estimated: a sibling that was
        accepted shows that the line was wrong."""
        lines = map(self.line, range(len(verdicts)))
        return [sum(node in line for node in verdict.nodes) for line, verdict in zip(lines, verdicts, strict=True)]

    def drawn_from(self, row: int, node: int) -> torch.Tensor | None:
        """The distribution ``[v]`` from which the children of a node were sampled, if they were."""
        return None if self.q is None or node >= self.q.shape[1] or not self.children(row, node) else self.q[row, node]


@dataclass
class Verdict:
    """What verification decided for one row.

    Attributes:
        tokens: the tokens that follow, the last of them chosen by the full model alone unless generation stopped.
        nodes: for each token the draft node it confirms, or -1.
        stopped: whether the last token met a stopping criterion.
        sources: for each token the node whose logits chose it.
        scores: for each token the scores ``[v]`` that it was chosen from, if they are recorded.
    """

    tokens: list[int]
    nodes: list[int]
    stopped: bool
    sources: list[int]
    scores: list[torch.Tensor] = field(default_factory=list)

    def add(self, token: int, node: int, source: int) -> None:
        """Appends a token, the draft node that it confirms (-1 for none) and the node whose logits chose it."""
        self.tokens.append(token)
        self.nodes.append(node)
        self.sources.append(source)

    def end(self, count: int) -> None:
        """Stops after the first ``count`` tokens."""
        self.stopped = True
        for values in (self.tokens, self.nodes, self.sources, self.scores):
            del values[count:]
