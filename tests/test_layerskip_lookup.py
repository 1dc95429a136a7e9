"""Prompt lookup: the same guesses as a naive scan, without the scan."""

import random

import pytest

from layerskip.draft.lookup import NgramIndex


def scan(tokens: list[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Every start from the right, longest n first; the row grows by its own guess."""
    for n in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):  # the suffix itself starts at len - n
            if tokens[start : start + n] == suffix:
                grown = list(tokens)
                for offset in range(num_tokens):
                    grown.append(grown[start + n + offset])
                return grown[len(tokens) :]
    return []


def index_of(tokens: list[int], **arguments: int) -> NgramIndex:
    index = NgramIndex(**arguments)
    index.extend(tokens)
    return index


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (3, 3), (2, 1), (1, 1), (5, 2)])
def test_a_naive_scan_agrees(max_ngram, min_ngram):
    draw = random.Random(max_ngram * 10 + min_ngram)
    found = 0
    for _ in range(2000):
        vocabulary = draw.randint(1, 6)
        tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(0, 30))]
        num_tokens = draw.randint(0, 12)
        expected = scan(tokens, num_tokens, max_ngram, min_ngram)
        assert index_of(tokens, max_ngram=max_ngram, min_ngram=min_ngram).propose(num_tokens) == expected, tokens
        found += bool(expected)
    assert 500 < found < 2000  # both kinds were tried


def test_token_by_token_is_all_at_once():
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(4) for _ in range(40)]
        single, pieces = NgramIndex(), NgramIndex()
        rest = tokens
        for length, token in enumerate(tokens, start=1):
            single.extend([token])
            assert single.propose(5) == index_of(tokens[:length]).propose(5)
        while rest:
            count = draw.randint(0, 7)
            pieces.extend(rest[:count])
            pieces.propose(3)  # asking changes nothing
            rest = rest[count:]
        assert len(pieces) == len(single) == 40
        assert pieces.propose(9) == single.propose(9)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("", ""),
        ("a", ""),
        ("abc", ""),
        ("aa", "aaaaaa"),
        ("ababab", "ababab"),
        ("abcabcab", "cabcab"),
        ("xabyzabwqab", "wqabwq"),  # the most recent of two
        ("abcdxxbcdyybcabc", "dxxbcd"),  # three letters, far away, before two or one nearby
        ("qabcxyq", "abcxyq"),  # one letter, for want of more
    ],
)
def test_guesses_one_can_check_by_hand(text, guess):
    assert index_of([ord(letter) for letter in text]).propose(6) == [ord(letter) for letter in guess]


def test_short_matches_can_be_left_to_another_draft():
    tokens = [7, 1, 2, 3, 7]
    assert index_of(tokens).propose(2) == [1, 2]
    assert index_of(tokens, min_ngram=2).propose(2) == []


class Counting(dict):
    """Counts what is asked of it; any other way in would be a scan."""

    count = 0

    def get(self, *arguments):
        self.count += 1
        return super().get(*arguments)

    def __setitem__(self, *arguments):
        self.count += 1
        super().__setitem__(*arguments)

    def __iter__(self):
        raise AssertionError("a scan")

    keys = values = items = __iter__


@pytest.mark.parametrize("length", [10, 1000, 20_000])
def test_no_step_costs_more_in_a_longer_row(length):
    index, counting = NgramIndex(), Counting()
    index._followed_at = counting
    draw = random.Random(1)
    index.extend([draw.randrange(3) for _ in range(length)])
    assert counting.count <= 3 * length
    counting.count = 0
    index.propose(8)
    assert 1 <= counting.count <= 3
    counting.count = 0
    index.extend([1])
    assert counting.count == 3


def test_memory_is_bounded_by_the_row():
    assert len(index_of(list(range(1000)))._followed_at) == 999 + 998 + 997
    assert len(index_of([5] * 1000)._followed_at) == 3


def test_zero_tokens_are_none_and_fewer_are_an_error():
    assert index_of([1, 1, 1]).propose(0) == []
    with pytest.raises(ValueError, match="num_tokens=-1"):
        index_of([1, 1, 1]).propose(-1)


@pytest.mark.parametrize("wrong", [{"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}, {"max_ngram": 0}])
def test_lengths_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="need 1 <= min_ngram <= max_ngram"):
        NgramIndex(**wrong)
