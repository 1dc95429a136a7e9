"""Which text is trained on, and which is held out.

A stable hash of a group's name decides whether it is trained on, used to choose settings ("validation") or only
reported ("test"): siblings never sit on two sides, and more documents never move an old one. Of one text file alone
the end is held out. Of a handful of documents chance may leave a split none: then one group of another is moved.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from train.messages import Message

SPLITS = ("train", "validation", "test")
HELD_OUT = SPLITS[1:]

_GROUPS_KEPT = 1000  # of each split, to choose from where another is empty


class Document(NamedTuple):
    """One text and where it is from."""

    text: str  # of a conversation: what is said in it
    name: str  # unique in the source: a path, or `path:line`, or `dataset:index`
    group: str  # documents of one group stay on one side of the split
    split: str = "train"  # one of SPLITS
    messages: tuple[Message, ...] = ()  # a conversation, for the chat template
    prompt_length: int = 0  # characters at the beginning of `text` that are given, not learnt
    is_file: bool = False  # a whole text file
    may_be: tuple[str, ...] = ()  # the splits that its group could be in as well


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on nothing but `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(group: str, held_out: float) -> str:
    """The split of a group; "test" and "validation" each get the share `held_out` of all, in expectation."""
    share = hash_share(group)
    return "test" if share < held_out else "validation" if share < 2 * held_out else "train"


def put_on_sides(
    documents: Iterator[Document], held_out: float, may_be: tuple[str, ...], moved: Mapping[float, str]
) -> Iterator[Document]:
    """Every document on its side; one text file alone is cut, for it could be on one only.

    Args:
        held_out: share of validation, and again of test.
        may_be: the splits that `held_out` leaves open.
        moved: see `Groups.moves`.
    """
    first = list(itertools.islice(documents, 2))
    if len(first) == 1 and first[0].is_file and held_out:
        yield from _cut(first[0], held_out)
        return
    for document in itertools.chain(first, documents):
        split = moved.get(hash_share(document.group), "") if moved else ""
        split = split if split in may_be else split_of(document.group, held_out)
        yield document._replace(split=split, may_be=may_be)


def _cut(file: Document, held_out: float) -> Iterator[Document]:
    """What to train on, `held_out` of it for validation, and its end for test; cut between lines, if it has any."""
    text, places = file.text, [0]
    for place in (round(len(text) * (1 - n * held_out)) for n in (2, 1)):
        places.append(text.find("\n", place - 1) + 1 or place if place else 0)
    for split, start, end in zip(SPLITS, places, [*places[1:], len(text)], strict=True):
        if text[start:end].strip():
            name = f"{file.name} ({split})"
            yield Document(text[start:end], name, name, split, is_file=True)


class Groups:
    """The groups that the splits of a run have text of: enough of them to fill a split that has none."""

    def __init__(self, enough: int) -> None:
        """`enough`: tokens that a split should have at least, one block."""
        self._enough = enough
        self._tokens: dict[str, dict[float, int]] = {split: {} for split in SPLITS}  # by the group's hash share
        self._may_be: dict[float, tuple[str, ...]] = {}

    def add(self, document: Document, num_tokens: int) -> None:
        """Note that a document was written, of `num_tokens` tokens."""
        groups = self._tokens[document.split]
        if len(groups) >= _GROUPS_KEPT:
            return
        share = hash_share(document.group)
        groups[share] = groups.get(share, 0) + num_tokens
        known = self._may_be.get(share, document.may_be)
        self._may_be[share] = tuple(split for split in known if split in document.may_be)

    def moves(self) -> dict[float, str]:
        """Which groups to move where, {hash share: split}, so that no split is empty; none if none is, or it cannot be.

        An empty split gets one group of the split that has most: of those that fill a block, the one of the lowest
        share. So it depends on the groups alone, and where chance left no split empty nothing is moved.
        """
        tokens = {split: dict(groups) for split, groups in self._tokens.items()}
        moved = {}
        for empty in (split for split in SPLITS if not tokens[split]):
            able = {split: [g for g in groups if empty in self._may_be[g]] for split, groups in tokens.items()}
            donors = [split for split in SPLITS if able[split] and len(tokens[split]) > 1]
            if not donors:
                return {}
            groups = tokens[max(donors, key=lambda split: len(tokens[split]))]
            candidates = [group for group in groups if empty in self._may_be[group]]
            chosen = min(candidates, key=lambda group: (groups[group] < self._enough, group))
            tokens[empty] = {chosen: groups.pop(chosen)}
            moved[chosen] = empty
        return moved
