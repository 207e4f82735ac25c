"""`--set path.to.key=value`: one setting of a recipe changed from the command line."""

from __future__ import annotations

from typing import Any

import yaml

from compress.errors import UserError, nearest


def override(content: dict[str, Any], setting: str) -> None:
    """Change `content` in place. A path goes through keys, and through lists by index or by the one item's key.

    Raises UserError, naming the setting, for a path that leads nowhere or a value that is not YAML.
    """
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise UserError(f"--set {setting}: the form is path.to.key=value, such as calibration.samples=128")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {setting}: the value is not valid YAML") from None
    place: Any = content
    *parents, last = path.split(".")
    for part in parents:
        place = _step(place, part, setting)
    if isinstance(place, list):
        raise UserError(f"--set {setting}: {last!r} is not a key of a list; give an index first, such as stages.0")
    place[last] = value


def _step(place: Any, part: str, setting: str) -> Any:
    """The section or list that `part` names in `place`; an empty one is made where there is none."""
    holder: Any
    key: Any
    if isinstance(place, list):
        holder, key = _item(place, part, setting)
    else:
        holder, key = place, part
    if not isinstance(holder, list) and holder.get(key) is None:
        holder[key] = {}
    found = holder[key]
    if not isinstance(found, dict | list):
        raise UserError(f"--set {setting}: {part!r} is a value, not a section")
    return found


def _item(items: list[Any], part: str, setting: str) -> tuple[Any, Any]:
    """The list and an index, or the one item that has this key and the key: where what `part` means is found."""
    if part.isdigit() and int(part) < len(items):
        return items, int(part)
    named = [item for item in items if isinstance(item, dict) and part in item]
    if len(named) == 1:
        return named[0], part
    names = [str(key) for item in items if isinstance(item, dict) for key in item]
    raise UserError(f"--set {setting}: no single item {part!r}; items: {', '.join(names)}{nearest(part, names)}")
