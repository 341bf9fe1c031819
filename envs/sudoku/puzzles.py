"""Which Sudoku puzzles are there?  A solver, a generator that proves each solution to be the only one, and a key that
is equal for all images of a puzzle.

A grid is a text with one character a cell, row by row: a digit, or "." for an empty cell. Inside the solver a cell is
its possible values as bits: 0b1010 stands for 2 or 4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # size -> rows and columns of a box
EFFORTS = ("any", "singles", "search")


class GridShape(NamedTuple):
    """A size of grid: its units (rows, columns, boxes, each a tuple of cells), and for each cell those it excludes."""

    size: int
    box: tuple[int, int]
    units: tuple[tuple[int, ...], ...]
    peers: tuple[tuple[int, ...], ...]
    units_of: tuple[tuple[int, int, int], ...]  # per cell the numbers of its row, column and box among the units

    @property
    def full(self) -> int:
        return (1 << self.size) - 1


class Puzzle(NamedTuple):
    """A level: Puzzle(clues="1.3434...143432.", solution="1234341221434321")."""

    clues: str
    solution: str


class Single(NamedTuple):
    """A cell with one possible value, in words: Single(cell=1, value=2, reason="1 2 can only be 2")."""

    cell: int
    value: int
    reason: str


@lru_cache
def shape_of(size: int) -> GridShape:
    high, wide = BOXES[size]
    places = [divmod(cell, size) for cell in range(size * size)]
    numbers = [(r, size + c, 2 * size + r // high * (size // wide) + c // wide) for r, c in places]
    units = tuple(tuple(cell for cell, own in enumerate(numbers) if unit in own) for unit in range(3 * size))
    peers = tuple(
        tuple(sorted({other for unit in own for other in units[unit]} - {cell})) for cell, own in enumerate(numbers)
    )
    return GridShape(size, (high, wide), units, peers, tuple(numbers))


# -- solving -----------------------------------------------------------------------------------------------------------


def assign(masks: list[int], cell: int, bit: int, peers: tuple[tuple[int, ...], ...]) -> bool:
    """Put a value into a cell and into every cell where only one is left; False where a cell has none left."""
    pending = [(cell, bit)]
    while pending:
        cell, bit = pending.pop()
        if not masks[cell] & bit:
            return False
        masks[cell] = bit
        for peer in peers[cell]:
            mask = masks[peer]
            if mask & bit:
                mask ^= bit
                if not mask:
                    return False
                masks[peer] = mask
                if not mask & (mask - 1):
                    pending.append((peer, mask))
    return True


def masks_of(shape: GridShape, grid: str) -> list[int] | None:
    """Return the possible values of each cell after all cells with only one are filled; None for a contradiction."""
    masks = [shape.full] * len(grid)
    for cell, value in enumerate(grid):
        if value != "." and not assign(masks, cell, 1 << int(value) - 1, shape.peers):
            return None
    return masks


def solve_grid(shape: GridShape, masks: list[int], rng: np.random.Generator | None = None) -> list[int] | None:
    """Return a solution or None: depth first, the cell with the fewest values first; `rng` mixes values."""
    fewest, cell = 99, -1
    for place, mask in enumerate(masks):
        if mask & (mask - 1) and (count := mask.bit_count()) < fewest:
            fewest, cell = count, place
            if count == 2:
                break
    if cell < 0:
        return masks
    bits = [1 << value for value in range(shape.size) if masks[cell] >> value & 1]
    for bit in bits if rng is None else (bits[k] for k in rng.permutation(len(bits))):
        tried = masks.copy()
        if assign(tried, cell, bit, shape.peers) and (solved := solve_grid(shape, tried, rng)) is not None:
            return solved
    return None


def another_value(shape: GridShape, grid: str, cell: int, value: int) -> bool:
    """Return whether the grid, which has a solution with `value` in an empty cell, has one with another value there."""
    bit, seen = 1 << value - 1, {grid[peer] for peer in shape.peers[cell]}
    if len(seen - {"."}) == shape.size - 1:  # most cells of a grid with many clues
        return False
    masks = masks_of(shape, grid)
    assert masks is not None and masks[cell] & bit
    others = masks[cell] ^ bit
    for other in (1 << k for k in range(shape.size) if others >> k & 1):
        tried = masks.copy()
        if assign(tried, cell, other, shape.peers) and solve_grid(shape, tried) is not None:
            return True
    return False


def grid_text(masks: list[int]) -> str:
    return "".join(str(mask.bit_length()) for mask in masks)


def candidates(shape: GridShape, grid: str) -> dict[int, int]:
    """Return for each empty cell the values that its row, column and box do not have yet, as bits."""
    used = [0] * len(shape.units)
    for cell, value in enumerate(grid):
        if value != ".":
            for unit in shape.units_of[cell]:
                used[unit] |= 1 << int(value) - 1
    bits = {}
    for cell, value in enumerate(grid):
        if value == ".":
            row, column, box = shape.units_of[cell]
            bits[cell] = shape.full & ~(used[row] | used[column] | used[box])
    return bits


def singles(shape: GridShape, grid: str) -> Iterator[Single]:
    """Yield the cells that need no guess: with one value left, then the only place of a value in a unit."""
    left, size = candidates(shape, grid), shape.size
    for cell, mask in left.items():
        if mask and not mask & (mask - 1):
            value = mask.bit_length()
            yield Single(cell, value, f"{place_digit(size, cell)} can only be {value}")
    for number, unit in enumerate(shape.units):
        kind = ("row", "column", "box")[number // size]
        once = twice = 0
        for cell in unit:
            mask = left.get(cell, 0)
            twice |= once & mask
            once |= mask
        for cell in unit:
            if bit := left.get(cell, 0) & once & ~twice:
                value = bit.bit_length()
                yield Single(cell, value, f"{value} fits in its {kind} only at {place_digit(size, cell)}")


def place_digit(size: int, cell: int) -> str:
    return f"{cell // size + 1} {cell % size + 1}"


def by_singles(shape: GridShape, grid: str) -> bool:
    """Return whether the puzzle can be solved without a guess, one single after the other."""
    while "." in grid:
        values = {single.cell: str(single.value) for single in singles(shape, grid)}
        if not values:
            return False
        grid = "".join(values.get(cell, value) for cell, value in enumerate(grid))
    return True


# -- making ------------------------------------------------------------------------------------------------------------


def full_grid(shape: GridShape, rng: np.random.Generator) -> str:
    """Return a solved grid: the first row at random, then random values wherever there is a choice."""
    masks = [shape.full] * shape.size**2
    for cell, value in enumerate(rng.permutation(shape.size)):
        assign(masks, cell, 1 << int(value), shape.peers)
    solved = solve_grid(shape, masks, rng)
    assert solved is not None  # every first row can be completed
    return grid_text(solved)


def make_puzzle(shape: GridShape, clues: int, rng: np.random.Generator) -> Puzzle | None:
    """Return a puzzle with `many` clues and one solution: cells are emptied while no other value is possible there.

    None if that ends before. A grid with one solution keeps it when a cell is emptied
    exactly if no solution has another value there, so each step is a proof.
    """
    solution = full_grid(shape, rng)
    grid, left = solution, len(solution)
    for cell in (int(cell) for cell in rng.permutation(len(solution))):
        if left == clues:
            break
        emptied = f"{grid[:cell]}.{grid[cell + 1 :]}"
        if not another_value(shape, emptied, cell, int(solution[cell])):
            grid, left = emptied, left - 1
    return Puzzle(grid, solution) if left == clues else None


# -- the key -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def puzzle_key(clues: str) -> str:
    """Return a text that is equal for puzzles that differ only by the names of digits and a symmetry of the grid."""
    shape = shape_of(round(len(clues) ** 0.5))
    size, (high, wide) = shape.size, shape.box
    kinds = ["row" if high == wide or unit < size else "column" for unit in range(2 * size)] + ["box"] * size
    kinds += ["band" if high == wide or k < size // high else "stack" for k in range(size // high + size // wide)]
    digits, bands = len(kinds), 3 * size
    stacks = bands + size // high
    kinds += ["digit"] * size
    edges = [(row, bands + row // high) for row in range(size)]
    edges += [(size + column, stacks + column // wide) for column in range(size)]
    for box in range(size):
        edges += [(2 * size + box, bands + box // (size // wide)), (2 * size + box, stacks + box % (size // wide))]
    for cell, value in enumerate(clues):
        if value != ".":
            edges += [(len(kinds), end) for end in (*shape.units_of[cell], digits + int(value) - 1)]
            kinds.append("clue")
    near: list[list[int]] = [[] for _ in kinds]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    names = sorted(set(kinds))
    colours, count, history = [names.index(kind) for kind in kinds], 0, hashlib.sha256(str(size).encode())
    while len(set(colours)) > count:
        count = len(set(colours))
        seen = [(colours[node], tuple(sorted(colours[other] for other in near[node]))) for node in range(len(kinds))]
        history.update(repr(sorted(seen)).encode())
        numbers = {what: number for number, what in enumerate(sorted(set(seen)))}
        colours = [numbers[what] for what in seen]
    return history.hexdigest()[:32]
