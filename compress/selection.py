"""Which linears a stage quantizes, and whether the group size fits them: known from the config, before any data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compress.errors import UserError, nearest

if TYPE_CHECKING:  # arch imports torch; this file stays free of it
    from compress.arch import ModelSpec

BITS = range(2, 9)
PER_CHANNEL = -1  # the recipe's spelling of one group as wide as the row, as in GPTQ and compressed-tensors
OFFERED_GROUP_SIZES = (256, 128, 64, 32, 16, 8)

_BLOCK_PREFIX = re.compile(r"model\.layers\.\d+\.")


def local_name(linear: str) -> str:
    """`mlp.down_proj` for `model.layers.3.mlp.down_proj`; a name outside the blocks is itself."""
    return _BLOCK_PREFIX.sub("", linear)


def matches(pattern: str, linear: str) -> bool:
    """Whether an `ignore` entry names this linear.

    An entry is a full name, the end of one (`lm_head`, `down_proj`, `mlp.down_proj`), or `re:` and a regular
    expression that must match from the start of the full name, as in compressed-tensors.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], linear) is not None
    return linear == pattern or linear.endswith("." + pattern)


def select_linears(spec: ModelSpec, ignore: Sequence[str], where: str = "ignore") -> dict[str, bool]:
    """Every linear of the model by full name: True to quantize, False to keep.

    Raises UserError, naming `where` in the recipe, for a pattern that is not a regular expression or matches no
    linear, and when nothing is left to quantize.
    """
    linears = list(spec.linears())
    for pattern in ignore:
        try:
            matched = any(matches(pattern, linear) for linear in linears)
        except re.error as error:
            raise UserError(f"{where}: {pattern!r} is not a regular expression: {error}") from None
        if not matched:
            raise UserError(f"{where}: {pattern!r} matches no linear; {_accepted(pattern, linears)}")
    selected = {linear: not any(matches(pattern, linear) for pattern in ignore) for linear in linears}
    if not any(selected.values()):
        raise UserError(f"{where}: the patterns keep all {len(linears)} linears, so nothing is left to quantize")
    return selected


def _accepted(pattern: str, linears: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(local_name(linear) for linear in linears))
    ends = [kind.rpartition(".")[2] for kind in kinds]
    bare = re.sub(r"[^\w.]|^re:", "", pattern.removeprefix("re:")).strip(".")
    return f"linears here: {', '.join(kinds)}{nearest(bare, [*kinds, *ends, *linears])}"


def check_groups(
    spec: ModelSpec, selected: Mapping[str, bool], bits: int, group_size: int, where: str = "quantize"
) -> None:
    """Refuse a width outside 2–8 bits, and a group size that does not divide the input width of a selected linear.

    Raises UserError naming each kind of linear that does not fit, its columns and the group sizes that do.
    """
    if bits not in BITS:
        raise UserError(f"{where}.bits: {bits} is not supported; accepted: {BITS.start} to {BITS.stop - 1}")
    if group_size == PER_CHANNEL:
        return
    if group_size < 1:
        raise UserError(f"{where}.group_size: {group_size}; accepted: a positive width, or -1 for one scale a row")
    columns = {local_name(name): shape[1] for name, shape in spec.linears().items() if selected[name]}
    misfits = {kind: width for kind, width in columns.items() if width % group_size}
    if misfits:
        raise UserError(f"{where}.group_size: {_misfit(group_size, columns, misfits)}")


def fitting_group_sizes(columns: int) -> list[int]:
    """The usual group sizes that divide a row of `columns`, largest first."""
    return [size for size in OFFERED_GROUP_SIZES if columns % size == 0]


def _misfit(group_size: int, columns: Mapping[str, int], misfits: Mapping[str, int]) -> str:
    by_width: dict[int, list[str]] = {}
    for kind, width in misfits.items():
        by_width.setdefault(width, []).append(kind)
    found = "; ".join(
        f"{', '.join(kinds)} ({width} columns: {_listed(fitting_group_sizes(width))})"
        for width, kinds in by_width.items()
    )
    common = [size for size in fitting_group_sizes(next(iter(columns.values()))) if _fits_all(size, columns)]
    advice = f"set group_size: {common[0]}" if common else "set group_size: -1"
    if len(misfits) < len(columns):
        advice += f", or add to ignore: {', '.join(kind.rpartition('.')[2] for kind in misfits)}"
    return f"{group_size} does not divide {found}; {advice}"


def _fits_all(size: int, columns: Mapping[str, int]) -> bool:
    return all(width % size == 0 for width in columns.values())


def _listed(sizes: Sequence[int]) -> str:
    return f"{', '.join(str(size) for size in sizes)} fit" if sizes else "only -1 fits"
