"""Where the tokens of one pass stand: their slots in the cache, their positions, and what each of them may see.

A chain over one sequence needs none of this: its tokens follow the cache's last position and the model's own masks
are right. Rows of unequal length and candidate trees do. Every row fills its slots from 0, so that committed token j
stands in slot j at position j, whatever the other rows do: windows and chunks, which count positions, stay right.
Drafted node i of a row (0 is the root) takes slot length + i at position length + depth(i).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """How far a layer looks back: everything (both None), the last `window` positions, or its `chunk` of positions."""

    window: int | None = None
    chunk: int | None = None


@dataclass
class Block:
    """The tokens of one pass over B rows.

    Attributes:
        slots: (B, n) cache slots that the tokens are written to.
        positions: (B, n) their positions.
        visible: (B, n, end) bool: which slots each may see, itself included, before any window.
        slot_positions: (B, end) the position that stands in each slot.
    """

    slots: Tensor
    positions: Tensor
    visible: Tensor
    slot_positions: Tensor
    rows: Tensor = field(init=False)  # (B, 1) 0 .. B-1, to index with beside the slots
    _masks: dict[tuple[Sight, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = torch.arange(self.slots.shape[0], device=self.slots.device)[:, None]

    @property
    def end(self) -> int:
        """Slots that the pass reads."""
        return self.visible.shape[-1]

    @property
    def length(self) -> int:
        """Tokens of a row in this pass, n."""
        return self.slots.shape[1]

    def mask(self, sight: Sight, dtype: torch.dtype) -> Tensor:
        """(B, 1, n, end) additive attention mask for a layer of that sight."""
        key = (sight, dtype)
        if key not in self._masks:
            visible = self.visible
            if sight.window is not None:
                visible = visible & (self.positions[..., None] - self.slot_positions[:, None] < sight.window)
            if sight.chunk is not None:
                chunks = self.positions[..., None] // sight.chunk == self.slot_positions[:, None] // sight.chunk
                visible = visible & chunks
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[key] = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        return self._masks[key]


def place(lengths: Tensor, depths: Tensor, ancestors: Tensor, nodes: Tensor | slice = slice(None)) -> Block:
    """The block of some nodes of B candidate trees, the roots at node 0.

    Args:
        lengths: (B,) positions that each row has in the cache.
        depths: (B, N) depth of each node, 0 for the root.
        ancestors: (B, N, N) bool: node i sees node j; itself included.
        nodes: those of the pass: the same of every row (slice), or (B, n) of their own. What else they see is in the
            cache already.
    """
    num_nodes = depths.shape[1]
    if isinstance(nodes, slice):
        nodes = torch.arange(num_nodes, device=depths.device)[nodes].expand(depths.shape[0], -1)
    all_slots = torch.arange(int(lengths.max()) + num_nodes, device=depths.device)
    node_of = all_slots - lengths[:, None]  # (B, end): negative where a committed token stands
    node = node_of.clamp(0, num_nodes - 1)
    sees = ancestors.gather(1, nodes[..., None].expand(-1, -1, num_nodes))  # (B, n, N)
    sees = sees.gather(2, node[:, None].expand(-1, nodes.shape[1], -1))  # (B, n, end)
    committed, drafted = node_of < 0, (node_of >= 0) & (node_of < num_nodes)
    return Block(
        slots=lengths[:, None] + nodes,
        positions=lengths[:, None] + depths.gather(1, nodes),
        visible=committed[:, None] | (drafted[:, None] & sees),
        slot_positions=torch.where(drafted, lengths[:, None] + depths.gather(1, node), all_slots),
    )
