"""The groups of input columns that share a scale in the packed form. Without torch: plans ask here, too."""

from octavo.errors import LoadError

GROUPS = (128, 64, 32, 16)  # largest first


def whole_group(name: str, group_size: int, columns: int) -> int:
    """The largest group of ours that a published group, and a row, are made of."""
    for group in GROUPS:
        if group_size % group == 0 and columns % group == 0:
            return group
    raise LoadError(f"{name}: groups of {group_size} in rows of {columns} are not made of groups of {' or '.join(map(str, GROUPS))}")
