"""What may be removed: all that no checkpoint needs which is to stay.

Manifests go first, and newer ones before those that they stand on, so that after any kill each manifest
that is left has all of its chunks and all that it stands on.

Must not know: how objects are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .manifest import Manifest, manifest_path, newest, number_of


def kept(needs: Mapping[str, Sequence[str]], keep: int) -> set[str]:
    """Names of the checkpoints that stay.

    Args:
        needs: what each whole checkpoint stands on, by name.
        keep: how many of the newest stay, with all that they stand on.

    Raises:
        ValueError: `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep=, complete checkpoints that stay, is at least 1; got {keep}")
    stay = sorted(needs, reverse=True)[:keep]
    return {name for one in stay for name in (one, *needs[one])}


def leftovers(paths: Iterable[str], manifests: Sequence[Manifest], keep: int) -> list[str]:
    """What to remove after a checkpoint was made whole, in this order.

    Args:
        paths: of all objects.
        manifests: of all whole checkpoints whose needs are whole as well; at least one.
        keep: see `kept`.

    Returns:
        Paths of manifests, then of chunks. Nothing of a checkpoint that is newer than the newest whole one:
        it may be in the making.
    """
    whole = {one.name: one for one in manifests}
    stay = kept({name: one.facts.needs for name, one in whole.items()}, keep)
    wanted = {chunk.path for name in stay for chunk in whole[name].chunks}
    last = max(one.facts.number for one in manifests)
    old = [path for path in paths if (number := number_of(path)) is not None and number <= last]
    going = [manifest_path(name) for name in newest(old) if name not in stay]
    wanted |= {manifest_path(name) for name in stay} | set(going)
    return going + [path for path in old if path not in wanted]
