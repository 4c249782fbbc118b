"""What do masks leave to do? A `BlockMask` is worked out once, used in many calls, printed and drawn."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int8

from pallas_flash.cells import ALL, NONE, SOME, Cells
from pallas_flash.masks import Mask
from pallas_flash.patterns import CELL, Surveyed, found, regrouped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which cells of 64 queries by 64 keys masks keep, wholly or in part. Made by `pallas_flash.block_mask`.

    A pytree of arrays: make it outside of a training step and pass it in, for all layers alike. `str` shows it in a
    terminal, `draw` makes a picture of it.

    Attributes:
        cells: int8 [B or 1, N or 1, ceil(T / 64), ceil(S / 64)]: 0 nothing is kept, 1 something, 2 everything.
        queries: bool [B or 1, T]: whether a query attends to anything.
        keys: bool [B or 1, S]: whether anything attends to a key.
        T, S: Numbers of queries and of keys.
    """

    cells: Int8[Any, "B N rows columns"]
    queries: Bool[Any, "B T"]
    keys: Bool[Any, "B S"]
    T: int = dataclasses.field(metadata={"static": True})
    S: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, mask: Mask, B: int, N: int, T: int, S: int) -> "BlockMask":
        """That of a mask of which arrays decide."""
        cells = Cells(B, N, T, S, CELL, CELL)
        queries, keys = mask.participants(cells)
        status = found(mask, cells).astype(jnp.int8)
        ones = (jnp.ones((1, n), bool) for n in (T, S))
        queries, keys = (one if part is None else part for one, part in zip(ones, (queries, keys), strict=True))
        return cls(status, queries, keys, T, S)

    def __and__(self, mask: Mask) -> Surveyed:
        """The mask, of which this tells what to visit."""
        return Surveyed(mask, self.cells, self.queries, self.keys, CELL)

    @property
    def share(self) -> float:
        """Of all cells, the share that is visited."""
        return float(jnp.mean(self.cells != NONE)) if self.cells.size else 0.0

    def __str__(self) -> str:
        """The first batch entry and head: `█` kept, `▒` in part, `·` skipped; at most 64 cells wide."""
        block = CELL * 2 ** max(0, math.ceil(math.log2(max(1, *self.cells.shape[2:]) / 64)))
        rows, columns = (-(-n // block) for n in (self.T, self.S))
        shown = np.asarray(regrouped(self.cells[:1, :1].astype(jnp.int32), CELL, (block, block), (rows, columns)))[0, 0]
        marks = {NONE: "·", SOME: "▒", ALL: "█"}
        lines = ["".join(marks[cell] for cell in row) for row in shown]
        title = f"{self.T} queries x {self.S} keys in cells of {block} squared, {self.share:.1%} visited"
        return "\n".join([title, *lines])

    def draw(self, path, b: int = 0, n: int = 0) -> None:
        """Writes a picture of one batch entry and head: visited, partly kept and skipped cells.

        Args:
            path: Of the file; its ending is the format, e.g. ".png".
            b: Batch entry.
            n: Query head.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        cells = self.cells[b if len(self.cells) > 1 else 0, n if self.cells.shape[1] > 1 else 0]
        colors = {"skipped": "#eeeeee", "partly kept": "#f4a259", "kept whole": "#2d6a8e"}
        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.add_subplot()
        extent = (0, cells.shape[1] * CELL, cells.shape[0] * CELL, 0)
        axes.imshow(np.asarray(cells), ListedColormap([*colors.values()]), vmin=NONE, vmax=ALL, extent=extent)
        axes.set(xlabel="key", ylabel="query", title=f"{self.share:.1%} of the cells are visited")
        handles = [Patch(facecolor=color, label=name) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        FigureCanvasAgg(figure).print_figure(path, dpi=150)
