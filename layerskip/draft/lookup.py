"""Prompt lookup: a draft that costs no layer. Text repeats itself: what followed the same words last time is a guess.

The guess depends on the committed tokens alone, so it is a deterministic draft (q is 1 at each proposed token), which
the rules of `acceptance.py` verify exactly, greedily and in sampling.

Where it differs from others (all of them try the longest n-gram first):

    transformers    n = 2 .. 1    first occurrence          scans the row at every step    ends at the row's end
    vLLM            n = 5         first occurrence          scans the row at every step    ends at the row's end
    here            n = 3 .. 1    most recent occurrence    a dictionary                   goes on (see `propose`)

The most recent occurrence, since what a text repeats is more often near than far, and since the first one never
changes: once its guess is wrong, it is proposed, and wrong, at later occurrences too.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The n-grams of one row's committed tokens, prompt and output, each with the place that followed it last.

    Tokens are only added: what is drafted and rejected never comes in. Memory grows with the row: at most
    `max_ngram - min_ngram + 1` entries a token (about 350 bytes a token by default, where no n-gram comes twice).

    Args:
        max_ngram: tokens of the longest suffix that is looked up. Longer ones seldom choose better.
        min_ngram: tokens of the shortest. 1 proposes nearly always, which suits a draft that has nothing else to
            offer; where an exit layer drafts when this does not, 2 or 3 leaves it the doubtful cases.

    Raises:
        ValueError: unless 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram} and max_ngram={max_ngram}: need 1 <= min_ngram <= max_ngram")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence

    def __len__(self) -> int:
        """Tokens indexed."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens: one dictionary entry for each of them and each n."""
        tokens = self._tokens
        for token in token_ids:
            # The n-grams that end before this token: only now has one a continuation. So the row's own suffix is
            # never in the dictionary, and an occurrence that overlaps it is.
            end = len(tokens)
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._followed_at[tuple(tokens[end - n :])] = end
            tokens.append(int(token))  # a tensor's elements would be equal to nothing

    def propose(self, num_tokens: int) -> list[int]:
        """What followed the most recent earlier occurrence of the longest suffix that has one.

        Where the row ends before `num_tokens` are found, the guess goes on through itself, as if it had been
        committed: after "abab" comes "abababa..." for as long as is asked.

        Args:
            num_tokens: 0 or more.

        Returns:
            `num_tokens` token ids; none where no suffix of `min_ngram` tokens or more occurred before. An end-of-text
            token may be among them: whoever commits them stops there.

        Raises:
            ValueError: if `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: ask for 0 or more")
        start = self._longest_match()
        if start is None or num_tokens == 0:
            return []
        followed = self._tokens[start : start + num_tokens]
        repeats = -(-num_tokens // len(followed))  # more than 1 only if `followed` reaches the row's end
        return (followed * repeats)[:num_tokens]

    def _longest_match(self) -> int | None:
        """Index of the token after it, by at most one look-up for each n."""
        end = len(self._tokens)
        for n in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            start = self._followed_at.get(tuple(self._tokens[end - n :]))
            if start is not None:
                return start
        return None
